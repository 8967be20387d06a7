"""A data set of parts of a few hand-made episodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from trace_jax.simulator.accepted import Place
from trace_jax.warehouse.dataset import Writer
from trace_jax.warehouse.splits import EpisodeSet

SETTINGS = {"seed": 7, "simulator": {"difficulty": "paper"}, "params": {"noise": 0.5, "table": [[0.25] * 40]}}


def write_parts(
    root: Path,
    episodes: EpisodeSet,
    *,
    upto: int = 3,
    resume: bool = False,
    settings: dict = SETTINGS,
    finish: bool = True,
    size: int = 4,
):
    """Parts of `size` episodes, as `trace-jax simulate` writes them. The manifest, or without `finish` the first part
    that was not on disk yet."""
    wanted = {"test": episodes.slice(0, min(upto * size, len(episodes)) if finish else len(episodes)).composition()}
    with Writer(root, settings, wanted, resume) as writer:
        start = writer.place("test").chunk if writer.place("test") else 0
        for number in range(start, upto):
            part = episodes.slice(number * size, (number + 1) * size)
            seen = Counter(episodes.slice(0, (number + 1) * size).composition())
            taken = tuple(seen[stratum] for stratum in wanted["test"])
            place = Place(number + 1, taken, tuple(2 * n + 1 for n in taken))
            writer.append("test", part.batch, part.verdict, number, place)
        return writer.finish() if finish else start


def contents(root: Path) -> dict[str, bytes]:
    """Every file by its path below `root`."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
