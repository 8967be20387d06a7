"""`trace-jax simulate`: verified episodes to Parquet, a chunk at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trace_jax.config import ConfigError, RunConfig, SimulatorConfig
from trace_jax.config_rules import RANGES, shown
from trace_jax.evaluation import identity, sets
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Bar, Progress
from trace_jax.simulator.accepted import CHUNK, Place, accepted_chunks, balanced_composition
from trace_jax.simulator.difficulty import params_of
from trace_jax.simulator.oracle import OracleParams
from trace_jax.simulator.stream import Composition, composition_for
from trace_jax.warehouse import dataset, splits
from trace_jax.warehouse.dataset import Writer
from trace_jax.warehouse.identity import described

IDENTIFIED = 5000  # episodes of a test split whose content is hashed
EPISODES = "episodes"  # the only split of a data set made with --episodes
COMPOSITIONS: dict[str, Callable[[SimulatorConfig, int], Composition]] = {
    "paper": composition_for,
    "balanced": lambda _, total: balanced_composition(total),
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
        ConfigError: bad arguments, an `out` that holds something else or that another process writes to, too few
            accepted episodes, a full disk.
    """
    check(names, episodes)
    config = sets.applied(config)
    sizes = {name: getattr(config.data, name) for name in dict.fromkeys(names or splits.SPLITS)}
    sizes = sizes if episodes is None else {EPISODES: episodes}
    plan = {name: _plan(config, name, size, composition, chunk) for name, size in sizes.items()}
    strata = {name: {key: n for part in parts for key, n in part.strata().items()} for name, parts in plan.items()}
    progress, start, made, simulated = Progress(), time.perf_counter(), 0, 0
    with Interrupt() as interrupt, Writer(out, _settings(config, composition, chunk, plan), strata, resume) as writer:
        for name, size in sizes.items():
            before, place = writer.episodes(name), writer.place(name)
            with progress.bar(name, size, before) as bar:
                for part in plan[name]:
                    chunks = accepted_chunks(
                        part.stage.simulator,
                        config.data.seed,
                        part.stage.stream,
                        part.composition,
                        chunk=chunk,
                        start=part.inside(place),
                        on_progress=_reporter(bar, interrupt, part.stage.start),
                    )
                    proposals = 0
                    for found in chunks:
                        place = part.outside(found.place, place, len(strata[name]))
                        writer.append(name, found.batch, found.verdict, place.chunk - 1, place)
                        proposals = found.simulated
                        interrupt.check()
                    simulated += proposals
            made += size - before
        manifest = writer.finish()
    seconds = time.perf_counter() - start
    known = _identity(out, sizes)
    counts = ", ".join(f"{entry['episodes']:,} {name}" for name, entry in manifest["splits"].items())
    print(f"{out}: {counts}; {made / seconds:,.0f} episodes/s")
    if known:
        print(identity.line(known))
    return {
        "out": str(out),
        "splits": manifest["splits"],
        "seconds": seconds,
        "episodes_per_s": made / seconds,
        "simulated": simulated,
        "benchmark": known,
    }


def _identity(out: Path, sizes: Mapping[str, int]) -> dict[str, Any] | None:
    """What the test split is, from the files; None without one of a size that fits in memory."""
    if not 0 < sizes.get("test", 0) <= IDENTIFIED:
        return None
    found = dataset.read(out, ["test"])["test"]
    return {"episodes": len(found), **described(found)}


def check(names: Sequence[str], episodes: int | None) -> None:
    """Refuses sizes that no data set has.

    Raises:
        ConfigError: `episodes` together with `names`, or out of the range of the sizes in `data`.
    """
    if episodes is None:
        return
    if names:
        raise ConfigError("--episodes makes one split of its own: leave out --split")
    low, high = RANGES["data.test"]
    if not low <= episodes <= high:
        raise ConfigError(f"--episodes {shown(episodes)}: it must be between {low} and {high}")


@dataclasses.dataclass(frozen=True)
class _Part:
    """A stage of a split as part of its files: which chunks are its own, and which strata of all stages' strata."""

    stage: splits.Stage
    composition: Composition
    label: str  # of its strata, when there are several stages
    chunk: int  # the first of its chunks
    column: int  # the first of its strata
    chunks: int

    def strata(self) -> dict[str, int]:
        """Episodes by the names that the log gives the strata."""
        return {f"{cause}/{d}{self.label}": n for (cause, d), n in self.composition.items()}

    def inside(self, place: Place | None) -> Place | None:
        """Where the stage's own stream stands when the split stands at `place`."""
        if place is None or place.chunk <= self.chunk:
            return None
        own = slice(self.column, self.column + len(self.composition))
        return Place(min(place.chunk - self.chunk, self.chunks), place.accepted[own], place.proposed[own])

    def outside(self, place: Place, before: Place | None, strata: int) -> Place:
        """The inverse of `inside`, given where the split stood before."""
        rest = strata - self.column - len(place.accepted)

        def columns(field: str) -> tuple[int, ...]:
            earlier = getattr(before, field)[: self.column] if before else ()
            return (*earlier, *getattr(place, field), *(0,) * rest)

        return Place(self.chunk + place.chunk, columns("accepted"), columns("proposed"))


def _plan(config: RunConfig, name: str, size: int, composition: str, chunk: int) -> list[_Part]:
    """What a split is made of: its stages in turn, each a whole number of chunks."""
    stages, parts, first, column = splits.stages_of(config, name, size), [], 0, 0
    for stage in stages:
        wanted = COMPOSITIONS[composition](stage.simulator, stage.size)
        label = f"/{stage.stream}" if len(stages) > 1 else ""
        parts.append(_Part(stage, wanted, label, first, column, -(-stage.size // chunk)))
        first, column = first + parts[-1].chunks, column + len(wanted)
    return parts


def _settings(config: RunConfig, composition: str, chunk: int, plan: Mapping[str, Sequence[_Part]]) -> dict[str, Any]:
    """All that determines the bytes of a data set."""
    stages = {
        name: [{"difficulty": p.stage.simulator.difficulty, "episodes": p.stage.size, "parts": p.chunks} for p in parts]
        for name, parts in plan.items()
        if name == "train" and config.data.curriculum
    }
    return {
        **splits.settings_of(config),
        "curriculum": list(config.data.curriculum) if stages else [],  # has no part in the other splits
        **({"stages": stages} if stages else {}),
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


def _reporter(bar: Bar, interrupt: Interrupt, start: int) -> Callable[[int, int], None]:
    """A progress callback of the stage that begins at `start`: moves the bar and lets Ctrl-C through."""

    def report(done: int, _: int) -> None:
        bar.update(start + done)
        interrupt.check()

    return report
