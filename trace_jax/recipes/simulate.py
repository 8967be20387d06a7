"""`trace-jax simulate`: verified episodes to Parquet, a chunk at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trace_jax.config import ConfigError, RunConfig
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Bar, Progress
from trace_jax.simulator.accepted import CHUNK, accepted_chunks, balanced_composition
from trace_jax.simulator.difficulty import params_of
from trace_jax.simulator.oracle import OracleParams
from trace_jax.simulator.stream import Composition, composition_for
from trace_jax.warehouse import splits
from trace_jax.warehouse.dataset import Writer

EPISODES = "episodes"  # the only split of a data set made with --episodes
COMPOSITIONS: dict[str, Callable[[RunConfig, int], Composition]] = {
    "paper": lambda config, total: composition_for(config.simulator, total),
    "balanced": lambda config, total: balanced_composition(total),
}
_VERSIONS = ("trace-jax", "jax", "numpy", "pyarrow")


def simulate(
    config: RunConfig,
    out: Path,
    *,
    names: Sequence[str] = (),
    episodes: int | None = None,
    composition: str = "paper",
    resume: bool = False,
    chunk: int = CHUNK,
) -> dict[str, Any]:
    """Writes a data set; returns a summary with the throughput.

    The memory is that of a few chunks, whatever the size. Bytes depend on the configuration and the versions of the
    libraries, not on `simulator.batch`, devices or interruptions.

    Args:
        names: splits of the configuration; default all three.
        episodes: instead of those, one split of this many.
        composition: of each split, a key of COMPOSITIONS.
        resume: continue what an interrupted run left in `out`.
        chunk: episodes in one part of each table.
    Raises:
        ConfigError: bad arguments, an `out` that holds something else, too few accepted episodes, a full disk.
    """
    if episodes is not None and names:
        raise ConfigError("--episodes makes one split of its own: leave out --split")
    if episodes is not None and episodes < 1:
        raise ConfigError(f"--episodes {episodes}: use 1 or more")
    sizes = {name: getattr(config.data, name) for name in dict.fromkeys(names or splits.SPLITS)}
    sizes = sizes if episodes is None else {EPISODES: episodes}
    wanted = {name: COMPOSITIONS[composition](config, size) for name, size in sizes.items()}
    strata = {name: {f"{c}/{d}": n for (c, d), n in parts.items()} for name, parts in wanted.items()}
    progress, start, made, simulated = Progress(), time.perf_counter(), 0, 0
    with Interrupt() as interrupt, Writer(out, _settings(config, composition, chunk), strata, resume) as writer:
        for name, size in sizes.items():
            before = writer.episodes(name)
            with progress.bar(name, size, before) as bar:
                chunks = accepted_chunks(
                    config.simulator,
                    config.data.seed,
                    name,
                    wanted[name],
                    chunk=chunk,
                    start=writer.place(name),
                    on_progress=_reporter(bar, interrupt),
                )
                proposals = 0
                for part in chunks:
                    writer.append(name, part.batch, part.verdict, part.number, part.place)
                    proposals = part.simulated
                    interrupt.check()
            made, simulated = made + size - before, simulated + proposals
        manifest = writer.finish()
    seconds = time.perf_counter() - start
    counts = ", ".join(f"{entry['episodes']:,} {name}" for name, entry in manifest["splits"].items())
    print(f"{out}: {counts}; {made / seconds:,.0f} episodes/s")
    return {
        "out": str(out),
        "splits": manifest["splits"],
        "seconds": seconds,
        "episodes_per_s": made / seconds,
        "simulated": simulated,
    }


def _settings(config: RunConfig, composition: str, chunk: int) -> dict[str, Any]:
    """All that determines the bytes of a data set."""
    return {
        **splits.settings_of(config),
        "composition": composition,
        "chunk": chunk,
        "params": _plain(params_of(config.simulator)),
        "oracle": _plain(OracleParams()),
        "versions": {name: metadata.version(name) for name in _VERSIONS},
    }


def _plain(params: Any) -> dict[str, Any]:
    """A dataclass of numbers and arrays as JSON has it."""

    def value(x: Any) -> Any:
        if isinstance(x, np.ndarray | jax.Array):
            return [round(float(v), 7) for v in x] if x.ndim == 1 else [value(row) for row in np.asarray(x)]
        return x

    return {field.name: value(getattr(params, field.name)) for field in dataclasses.fields(params)}


def _reporter(bar: Bar, interrupt: Interrupt) -> Callable[[int, int], None]:
    """A progress callback that moves the bar and lets Ctrl-C through."""

    def report(done: int, _: int) -> None:
        bar.update(done)
        interrupt.check()

    return report
