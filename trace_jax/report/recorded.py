"""Which of a run's trajectories a page holds: of every stage, held-out ones first, of training those of some steps."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trace_jax.config import ConfigError, RunConfig
from trace_jax.evaluation import table
from trace_jax.learner.credit import outcome_advantages
from trace_jax.policy import chat_files
from trace_jax.policy.chat import Chat, NanoChat
from trace_jax.rollout.trajectory import Trajectory, read_parquet

TRAINING_FILES = 16  # steps of training that are looked into, evenly apart
_TRAINING = re.compile(r"grpo-(\d+)")


@dataclass(frozen=True)
class Source:
    """A file of `trajectories/`: the answers of an agent to held-out episodes, or what one training step collected.

    Attributes:
        step: of training, None for held-out episodes.
    """

    path: Path
    rows: int
    step: int | None

    @property
    def label(self) -> str:
        """As people read it."""
        return table.LABELS.get(self.path.stem, self.path.stem) if self.step is None else f"GRPO step {self.step}"

    @property
    def split(self) -> str:
        """Whose episodes they are."""
        return "test" if self.step is None else "train"


@dataclass(frozen=True)
class Shown:
    """One trajectory of a page.

    Attributes:
        advantage: of its reward in its group; None for held-out episodes, and where the configuration is not known.
    """

    source: Source
    trajectory: Trajectory
    advantage: float | None


@dataclass(frozen=True)
class Recorded:
    """What a page holds of a run: `shown` of `total`, and notes about files that could not be read."""

    shown: list[Shown]
    total: int
    notes: list[str]

    @property
    def newest(self) -> Source | None:
        """Of the most advanced agent that was evaluated, else of the newest step."""
        return self.shown[0].source if self.shown else None


def sources(run_dir: Path) -> tuple[list[Source], list[str]]:
    """Files of a run: held-out episodes, the most advanced agent first, then training, the newest step first; and notes
    about damaged ones."""
    found, notes = [], []
    for path in sorted((run_dir / "trajectories").glob("*.parquet")):
        step = _TRAINING.fullmatch(path.stem)
        try:
            rows = pq.read_metadata(path).num_rows
        except (OSError, pa.ArrowException):
            notes.append(_damaged(path))
            continue
        if rows:
            found.append(Source(path, rows, int(step[1]) if step else None))
    place = {name: i for i, name in enumerate(reversed(table.LABELS))}
    held = [s for s in found if s.step is None]
    training = [s for s in found if s.step is not None]
    held.sort(key=lambda s: place.get(s.path.stem, len(place)))
    return held + sorted(training, key=lambda s: -(s.step or 0)), notes


def _damaged(path: Path) -> str:
    note = f"left out {path.name}, which is damaged or no trajectory file"
    warnings.warn(note, stacklevel=4)
    return note


def read(run_dir: Path, chat: Chat, config: RunConfig | None, limit: int) -> Recorded:
    """At most `limit` trajectories of a run: the first answer to every held-out episode by every agent, then the second
    ones, and of training whole groups of steps that lie evenly apart. Either may take what the other leaves.

    Args:
        chat: of the run's tokenizer. config: None where it cannot be read.

    Raises:
        ConfigError: a file was written with another tokenizer than the run's.
    """
    files, notes = sources(run_dir)
    held, training = ([s for s in files if (s.step is None) == yes] for yes in (True, False))
    steps = _apart(training, min(TRAINING_FILES, len(training), limit))
    there = [sum(s.rows for s in kind) for kind in (held, steps)]
    for_held = min(there[0], max(-(-limit // 2), limit - there[1]))
    quotas = _quotas(steps, min(there[1], limit - for_held))
    shown: list[Shown] = []
    order = {s.path: i for i, s in enumerate(held)}
    for source in held if for_held else ():
        shown += [Shown(source, t, None) for t in _rows(source, chat, notes)]
    shown.sort(key=lambda x: (x.trajectory.sample, order[x.source.path], x.trajectory.task_index))
    shown = shown[:for_held]
    for source in quotas:
        rows = _rows(source, chat, notes)
        advantages: list[float | None] = [None] * len(rows)
        if config is not None:
            found = outcome_advantages(rows, config.grpo, config.rollout.context, keep_constant=True)
            advantages = found.values.tolist()
        pairs = [Shown(source, t, a) for t, a in zip(rows, advantages, strict=True)]
        shown += _groups(pairs, quotas[source])
    order |= {s.path: len(order) + i for i, s in enumerate(quotas)}
    key = lambda x: (order[x.source.path], x.trajectory.task_index, x.trajectory.group, x.trajectory.sample)  # noqa: E731
    return Recorded(sorted(shown, key=key), sum(s.rows for s in files), notes)


def _apart(training: list[Source], count: int) -> list[Source]:
    """`count` of them, evenly apart, the newest and the oldest among them."""
    places = np.unique(np.linspace(0, len(training) - 1, count).round().astype(int)) if count > 1 else range(count)
    return [training[i] for i in places]


def _quotas(steps: list[Source], limit: int) -> dict[Source, int]:
    """Rows of each file, in their order: equal shares, and what a small one leaves goes to the others."""
    found: dict[Source, int] = {}
    for left, source in zip(range(len(steps), 0, -1), sorted(steps, key=lambda s: s.rows), strict=True):
        found[source] = min(source.rows, (limit - sum(found.values())) // left)
    return {source: found[source] for source in steps if found[source]}


def _groups(rows: list[Shown], limit: int) -> list[Shown]:
    """The first groups of a step, whole ones as long as that leaves any."""
    groups: dict[int, list[Shown]] = defaultdict(list)
    for x in rows:
        groups[x.trajectory.group].append(x)
    taken: list[Shown] = []
    for group in groups.values():
        if len(taken) + len(group) > limit:
            break
        taken += group
    return taken or rows[:limit]


def _rows(source: Source, chat: Chat, notes: list[str]) -> list[Trajectory]:
    try:
        rows = read_parquet(source.path, replay=False)
    except ConfigError:
        notes.append(_damaged(source.path))
        return []
    # A model imported with its tokenizer may have more rows than that has tokens.
    size = chat.tokenizer.vocab_size if isinstance(chat, NanoChat) else math.inf
    for t in rows:
        if len(t) and not 0 <= t.ids.min() <= t.ids.max() < size:
            own = source.path.parents[1] / chat_files.SENTENCEPIECE
            raise ConfigError(f"{source.path} was written with another tokenizer than {own}: delete it")
    return rows
