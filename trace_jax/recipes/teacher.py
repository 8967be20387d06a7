"""The SFT set: transcripts of the environment's teacher (`Domain.teacher`), as a rule those whose answer is right.

Tasks come in chunks, each chunk from its own stream, disjoint from all splits. A chunk is
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

from trace_jax.config import ConfigError, RolloutConfig, RunConfig
from trace_jax.policy.chat import Chat
from trace_jax.recipes import schedule
from trace_jax.recipes.domain import TaskSet, domain_of
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.pool import ProcessPool, wait
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory, writing

CHUNK = 2048  # tasks of a chunk; a small one wastes most of the proposals of each stratum's batch
TASK = 16  # tasks that a worker handles at a time
TOO_LONG = 0.02  # share of transcripts that may exceed the rollout limits; they are left out


@dataclass(frozen=True)
class Lesson:
    """One kept transcript. `steps` are (code, observation) pairs, `type` is the task's label."""

    system: str
    user: str
    steps: tuple[tuple[str, str], ...]
    answer: str
    type: str

    def messages(self) -> list[str]:
        """All texts in order, what the tokenizer is trained on."""
        return [self.system, self.user, *itertools.chain(*self.steps), self.answer]


def _investigate(config: RunConfig, chunk: int, start: int, tasks: TaskSet) -> list[Lesson | str]:
    """The teacher on a slice of a chunk; for a transcript that is not kept the task's type only."""
    domain = domain_of(config)
    environment = domain.environment(tasks, config)
    outcome: list[Lesson | str] = []
    for i in range(len(tasks)):
        rng = schedule.stream(config.data.seed, "teacher", chunk, start + i)
        task, transcript, right = domain.transcribe(environment, i, rng, config)
        steps = tuple((code, observation) for code, observation in transcript.steps)
        kind = task.labels["type"]
        keep = right or domain.mend is None
        outcome.append(Lesson(task.system, task.user, steps, transcript.answer, kind) if keep else kind)
    return outcome


class _Chunks:
    """Chunks of investigations; the next chunk's tasks are drawn while workers are busy with this one."""

    def __init__(self, config: RunConfig, size: int, pool: ProcessPool | None, interrupt: Interrupt):
        self._config, self._size, self._pool, self._interrupt = config, size, pool, interrupt
        self._ahead: tuple[int, list[Future]] | None = None

    def get(self, chunk: int, more: bool, wanted: int, on_progress: Callable[[int], None]) -> list[Lesson | str]:
        """Outcomes of a chunk, or of its first tasks if they have all lessons that are wanted. May raise `Interrupted`.

        Args:
            more: the following chunk is likely to be wanted.
            wanted: lessons that are still missing.
            on_progress: called with the number of tasks of this chunk that were investigated so far.
        """
        if self._pool is None:
            outcome: list[Lesson | str] = []
            for start, part in self._slices(chunk):
                self._interrupt.check()
                on_progress(start)
                outcome += _investigate(self._config, chunk, start, part)
                if _kept(outcome) >= wanted:
                    break
            return outcome
        if self._ahead is None or self._ahead[0] != chunk:
            self._ahead = (chunk, self._submit(chunk))
        jobs = self._ahead[1]
        self._ahead = (chunk + 1, self._submit(chunk + 1)) if more else None
        parts = wait(
            jobs,
            self._interrupt.check,
            lambda done: on_progress(done * TASK),
            lambda first: _kept([outcome for part in first for outcome in part]) >= wanted,
        )
        return [outcome for part in parts for outcome in part]

    def _slices(self, chunk: int) -> list[tuple[int, TaskSet]]:
        domain = domain_of(self._config)
        tasks = domain.draw(self._config, f"teacher-{chunk}", self._size, self._interrupt.check)
        starts = range(0, len(tasks), TASK)
        return [(start, tasks.slice(start, min(start + TASK, len(tasks)))) for start in starts]

    def _submit(self, chunk: int) -> list[Future]:
        return [
            self._pool.submit(_investigate, self._config, chunk, start, part) for start, part in self._slices(chunk)
        ]


def _workers(count: int) -> contextlib.AbstractContextManager[ProcessPool | None]:
    """Processes, not threads: the teacher is Python code. None for one worker."""
    return contextlib.nullcontext() if count == 1 else ProcessPool(count)


def size_of_chunks(config: RunConfig) -> int:
    """Tasks that the teacher investigates in one chunk."""
    rejected = 0 if domain_of(config).mend is None else config.sft.trajectories // 4  # a generous guess
    return min(CHUNK, config.sft.trajectories + rejected)


def build(run: RunDirectory, progress: Progress, interrupt: Interrupt) -> list[Lesson]:
    """The kept transcripts, `sft.trajectories` of them, in a fixed order.

    Raises:
        ConfigError: the teacher is right on hardly any task at these settings.
    """
    domain = domain_of(run.config)
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
                    chunk,
                    more,
                    wanted - before,
                    lambda n, before=before: bar.update(min(before + int(0.9 * n), wanted - 1)),
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
                    f"the {domain.teacher} answered only {len(lessons)} of {(chunk + 1) * size} episodes rightly: "
                    f"{domain.mend}"
                )
            interrupt.check()
    raise AssertionError("unreachable")


def _kept(outcome: Sequence[Lesson | str]) -> int:
    return sum(isinstance(o, Lesson) for o in outcome)


def _tried(outcome: Sequence[Lesson | str]) -> Counter:
    return Counter(o if isinstance(o, str) else o.type for o in outcome)


def _shares(outcome: Sequence[Lesson | str]) -> dict[str, float]:
    """Share of transcripts that are kept, in all and by task type."""
    kept = Counter(o.type for o in outcome if isinstance(o, Lesson))
    shares = {f"kept_{kind}": kept[kind] / count for kind, count in sorted(_tried(outcome).items())}
    return {"kept": kept.total() / len(outcome), **shares}


_COLUMNS = ("system", "user", "steps", "answer", "type")


def _write(path: Path, outcome: Sequence[Lesson | str]) -> None:
    rows = [asdict(o) | {"steps": json.dumps(o.steps)} for o in outcome if isinstance(o, Lesson)]
    schema = pa.schema([(n, pa.string()) for n in _COLUMNS])
    table = pa.Table.from_pylist(rows, schema=schema.with_metadata({"tried": json.dumps(_tried(outcome))}))
    partial = path.with_suffix(".partial")
    with writing(path):
        pq.write_table(table, partial, compression="zstd")
        partial.replace(path)


def _read(path: Path) -> tuple[list[Lesson], dict[str, int]]:
    try:
        table = pq.read_table(path).select(_COLUMNS)  # files of earlier versions have more
        tried = json.loads(table.schema.metadata[b"tried"])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
        raise ConfigError(f"teacher file {path} is damaged: delete it and --resume") from None
    rows = table.to_pylist()
    return [Lesson(**row | {"steps": tuple(map(tuple, json.loads(row["steps"])))}) for row in rows], tried


@dataclass(frozen=True)
class EncodedLesson:
    """Token streams of a transcript, see `policy.chat.transcript`."""

    ids: np.ndarray
    loss_mask: np.ndarray
    turn_index: np.ndarray


def encode(lessons: Sequence[Lesson], chat: Chat, config: RunConfig) -> tuple[list[EncodedLesson], int]:
    """Token streams of the transcripts that fit the rollout limits, and how many did not.

    A teacher without a stop rule (`sft.without`) is cut off by the limits as a policy would be: what fits is kept.

    Raises:
        ConfigError: more than `TOO_LONG` of them do not fit: a policy trained on the rest could not finish its answers.
    """
    encoded = [EncodedLesson(*chat.encode_transcript(x.system, x.user, x.steps, x.answer)) for x in lessons]
    limits = config.rollout
    if "stopping" in config.sft.without:
        encoded = [_cut_off(e, limits) for e in encoded]
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


def _cut_off(lesson: EncodedLesson, limits: RolloutConfig) -> EncodedLesson:
    """The lesson up to the last turn of the teacher that ends within the limits of turns and context."""
    turns = int(lesson.turn_index.max()) + 1
    ends = [int(np.flatnonzero(lesson.loss_mask & (lesson.turn_index == k))[-1]) + 1 for k in range(turns)]
    fitting = [end for end in ends[: limits.max_turns] if end <= limits.context]
    end = max(fitting, default=len(lesson.ids))
    return EncodedLesson(lesson.ids[:end], lesson.loss_mask[:end], lesson.turn_index[:end])
