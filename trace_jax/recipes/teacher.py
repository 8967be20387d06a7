"""The SFT set: transcripts of the scripted analyst whose answer is right (rejection sampling).

Episodes come in chunks, each chunk from its own stream, disjoint from all splits. A chunk is
a function of (configuration, chunk number); finished chunks are kept in `data/teacher/` of the run directory, so a
resumed run goes on with the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trace_jax.config import ConfigError, RunConfig
from trace_jax.environments.ads import analyst
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.policy.chat import NanoChat
from trace_jax.recipes import schedule
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.pool import ProcessPool, wait
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory, writing
from trace_jax.simulator.accepted import accepted_episodes
from trace_jax.simulator.stream import composition_of
from trace_jax.warehouse.splits import EpisodeSet

CHUNK = 2048  # episodes of a chunk; a small one wastes most of the proposals of each stratum's batch
# Weights of the episode types. Flatter than the splits: a cause with one lesson in a hundred is hardly learnt.
TYPES = {"campaign": 0.2, "mix": 0.12, "segment_1d": 0.33, "segment_2d": 0.25, "no_signal": 0.1}
TASK = 16  # episodes that a worker handles at a time
TOO_LONG = 0.02  # share of transcripts that may exceed the rollout limits; they are left out


@dataclass(frozen=True)
class Lesson:
    """One kept transcript. `steps` are (code, observation) pairs, `type` and `cause` the episode's labels."""

    system: str
    user: str
    steps: tuple[tuple[str, str], ...]
    answer: str
    type: str
    cause: str

    def messages(self) -> list[str]:
        """All texts in order, what the tokenizer is trained on."""
        return [self.system, self.user, *itertools.chain(*self.steps), self.answer]


def _investigate(config: RunConfig, chunk: int, start: int, episodes: EpisodeSet) -> list[Lesson | str]:
    """The analyst on a slice of a chunk; for a wrong answer the episode's type only."""
    environment = AdsEnvironment(episodes, config.environment)
    outcome: list[Lesson | str] = []
    for i in range(len(episodes)):
        task = environment.task(i)
        episode = environment.open(task)
        try:
            rng = schedule.stream(config.data.seed, "teacher", chunk, start + i)
            transcript = analyst.investigate(episode, task, rng, config.environment.prompt)
            right = bool(episode.grade(transcript.answer).info["full_right"])
        finally:
            episode.close()
        steps = tuple((code, observation) for code, observation in transcript.steps)
        kind, cause = task.labels["type"], task.labels["cause"]
        outcome.append(Lesson(task.system, task.user, steps, transcript.answer, kind, cause) if right else kind)
    return outcome


class _Chunks:
    """Chunks of investigations; the next chunk's episodes are simulated while workers are busy with this one."""

    def __init__(self, config: RunConfig, size: int, pool: ProcessPool | None, interrupt: Interrupt):
        self._config, self._size, self._pool, self._interrupt = config, size, pool, interrupt
        self._ahead: tuple[int, list[Future]] | None = None

    def get(self, chunk: int, more: bool, on_progress: Callable[[int], None]) -> list[Lesson | str]:
        """Outcomes of a chunk. May raise `Interrupted`.

        Args:
            more: the following chunk is likely to be wanted.
            on_progress: called with the number of episodes of this chunk that were investigated so far.
        """
        if self._pool is None:
            outcome: list[Lesson | str] = []
            for start, part in self._slices(chunk):
                self._interrupt.check()
                on_progress(start)
                outcome += _investigate(self._config, chunk, start, part)
            return outcome
        if self._ahead is None or self._ahead[0] != chunk:
            self._ahead = (chunk, self._submit(chunk))
        jobs = self._ahead[1]
        self._ahead = (chunk + 1, self._submit(chunk + 1)) if more else None
        parts = wait(jobs, self._interrupt.check, lambda done: on_progress(done * TASK))
        return [outcome for part in parts for outcome in part]

    def _slices(self, chunk: int) -> list[tuple[int, EpisodeSet]]:
        name = f"teacher-{chunk}"
        accepted = accepted_episodes(
            self._config.simulator,
            self._config.data.seed,
            name,
            composition_of(self._size, TYPES),
            on_progress=self._interrupt.check,
        )
        episodes = EpisodeSet(*accepted, split=name)
        starts = range(0, len(episodes), TASK)
        return [(start, episodes.slice(start, min(start + TASK, len(episodes)))) for start in starts]

    def _submit(self, chunk: int) -> list[Future]:
        return [
            self._pool.submit(_investigate, self._config, chunk, start, part) for start, part in self._slices(chunk)
        ]


def _workers(count: int) -> contextlib.AbstractContextManager[ProcessPool | None]:
    """Processes, not threads: the analyst is Python code. None for one worker."""
    return contextlib.nullcontext() if count == 1 else ProcessPool(count)


def size_of_chunks(config: RunConfig) -> int:
    """Episodes that the analyst investigates in one chunk."""
    return min(CHUNK, config.sft.trajectories + config.sft.trajectories // 4)


def build(run: RunDirectory, progress: Progress, interrupt: Interrupt) -> list[Lesson]:
    """The kept transcripts, `sft.trajectories` of them, in a fixed order.

    Raises:
        ConfigError: the analyst is right on hardly any episode at these settings.
    """
    config, wanted = run.config, run.config.sft.trajectories
    folder = run.folder("data/teacher")
    size = size_of_chunks(config)
    lessons: list[Lesson] = []
    with contextlib.ExitStack() as stack:
        chunks: _Chunks | None = None
        bar = stack.enter_context(progress.bar("teacher", wanted))
        for chunk in itertools.count():
            path = folder / f"{chunk:05d}.parquet"
            if not path.exists():
                if chunks is None:
                    pool = stack.enter_context(_workers(config.sft.teacher_workers))
                    chunks = _Chunks(config, size, pool, interrupt)
                more, before = len(lessons) + 0.9 * size < wanted, len(lessons)
                # Within a chunk the share that will be kept is not known yet: a guess on the low side.
                outcome = chunks.get(
                    chunk, more, lambda n, before=before: bar.update(min(before + int(0.9 * n), wanted - 1))
                )
                run.truncate("teacher", chunk)
                run.log("teacher", chunk + 1, _shares(outcome))
                _write(path, outcome)
            kept, tried = _read(path)
            lessons += kept
            bar.update(min(len(lessons), wanted), kept=len(kept) / sum(tried.values()))
            if len(lessons) >= wanted:
                return lessons[:wanted]
            if chunk >= 4 and len(lessons) < 0.02 * (chunk + 1) * size:
                raise ConfigError(
                    f"the analyst answered only {len(lessons)} of {(chunk + 1) * size} episodes rightly: "
                    "raise simulator.days or environment.tool_characters"
                )
            interrupt.check()
    raise AssertionError("unreachable")


def _tried(outcome: Sequence[Lesson | str]) -> Counter:
    return Counter(o if isinstance(o, str) else o.type for o in outcome)


def _shares(outcome: Sequence[Lesson | str]) -> dict[str, float]:
    """Share of right answers, in all and by episode type."""
    kept = Counter(o.type for o in outcome if isinstance(o, Lesson))
    shares = {f"kept_{kind}": kept[kind] / count for kind, count in sorted(_tried(outcome).items())}
    return {"kept": kept.total() / len(outcome), **shares}


def _write(path: Path, outcome: Sequence[Lesson | str]) -> None:
    rows = [asdict(o) | {"steps": json.dumps(o.steps)} for o in outcome if isinstance(o, Lesson)]
    schema = pa.schema([(n, pa.string()) for n in ("system", "user", "steps", "answer", "type", "cause")])
    table = pa.Table.from_pylist(rows, schema=schema.with_metadata({"tried": json.dumps(_tried(outcome))}))
    partial = path.with_suffix(".partial")
    with writing(path):
        pq.write_table(table, partial, compression="zstd")
        partial.replace(path)


def _read(path: Path) -> tuple[list[Lesson], dict[str, int]]:
    try:
        table = pq.read_table(path)
        tried = json.loads(table.schema.metadata[b"tried"])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
        raise ConfigError(f"teacher file {path} is damaged: delete it and --resume") from None
    rows = table.to_pylist()
    return [Lesson(**row | {"steps": tuple(map(tuple, json.loads(row["steps"])))}) for row in rows], tried


@dataclass(frozen=True)
class EncodedLesson:
    """Token streams of a transcript, see `NanoChat.encode_transcript`."""

    ids: np.ndarray
    loss_mask: np.ndarray
    turn_index: np.ndarray


def encode(lessons: Sequence[Lesson], chat: NanoChat, config: RunConfig) -> tuple[list[EncodedLesson], int]:
    """Token streams of the transcripts that fit the rollout limits, and how many did not.

    Raises:
        ConfigError: more than `TOO_LONG` of them do not fit: a policy trained on the rest could not finish its answers.
    """
    encoded = [EncodedLesson(*chat.encode_transcript(x.system, x.user, x.steps, x.answer)) for x in lessons]
    limits = config.rollout
    needs = {
        "rollout.context": np.array([len(e.ids) for e in encoded]),
        "rollout.max_turn_tokens": np.array([np.bincount(e.turn_index[e.loss_mask]).max() for e in encoded]),
        "rollout.max_turns": np.array([e.turn_index.max() + 1 for e in encoded]),
    }
    allowed = {
        "rollout.context": limits.context,
        "rollout.max_turn_tokens": limits.max_turn_tokens,
        "rollout.max_turns": limits.max_turns,
    }
    fits = np.ones(len(encoded), bool)
    for name, need in needs.items():
        over = need > allowed[name]
        if over.mean() > TOO_LONG:
            raise ConfigError(
                f"`{name}` ({allowed[name]}) would cut {over.mean():.0%} of the teacher's transcripts: "
                f"raise it to {int(need.max())}, e.g. continue with --resume --{name} {int(need.max())}"
            )
        fits &= ~over
    return [e for e, good in zip(encoded, fits, strict=True) if good], int((~fits).sum())
