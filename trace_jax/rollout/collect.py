"""Collection of trajectories: the policy samples turns, tools answer between them, the environment grades.

Token in, token out: a row is the prompt's ids, the sampled ids and the observations' ids, concatenated and never
encoded again. Rows take their turns together; tools of one turn run in a pool of threads. The result is a function of
the policy, the tasks and the seeds: neither the number of workers nor the order in which tools return changes it
(time-outs aside).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from trace_jax.config import ConfigError, RolloutConfig
from trace_jax.environments.base import Environment, Episode, Observation, Task
from trace_jax.rollout.engine import Generator
from trace_jax.rollout.lane import SampledTurn
from trace_jax.rollout.sampling import Sampling
from trace_jax.rollout.trajectory import PROMPT_TURN, STATUSES, Trajectory
from trace_jax.rollout.workers import Call, WorkerPool


class Chat(Protocol):
    """What collection needs of a chat format."""

    def encode_prompt(self, system: str, user: str) -> Sequence[int]: ...

    def encode_observation(self, text: str) -> Sequence[int]: ...

    def parse_turn(self, ids: Sequence[int]) -> Any: ...  # .kind "call" | "answer" | "malformed", .text


@dataclass
class CollectStats:
    """Where the time of a collection went, in wall-clock seconds. Add several collections by passing the same
    object."""

    prefill: float = 0.0
    decode: float = 0.0
    tools: float = 0.0
    total: float = 0.0


def collect(
    generator: Generator,
    chat: Chat,
    environment: Environment,
    tasks: Sequence[Task | int],
    *,
    group: int,
    config: RolloutConfig,
    seed: int,
    step: int,
    workers: int | None = None,
    sampling: Sampling | None = None,
    stats: CollectStats | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Trajectory]:
    """Samples `group` trajectories of each task.

    Args:
      generator: the sampler, e.g. `engine.Engine`.
      chat: turn format.
      environment: opens episodes; `open` is called from one background thread, `step` from the tool threads.
      tasks: tasks, or their indices in the environment. A task that is named twice is sampled anew.
      group: trajectories a task.
      config: limits; its `temperature` unless `sampling` is given.
      seed: of the run. step: of the run; the two, the task, and the place in the group seed every trajectory.
      workers: tool threads, `config.tool_workers` by default.
      sampling: overrides the temperature. Log-probabilities of a sampler that the learner does not reproduce (greedy,
        top-k) are withheld as NaN.
      stats: filled with timings.
      progress: called with (trajectories ended, trajectories in all).

    Returns:
      Trajectories ordered by task, then by place in the group.

    Raises:
      ConfigError: a prompt that leaves no room for a turn in `config.context`.
    """
    start = time.perf_counter()
    sampling = sampling or Sampling(config.temperature)
    stats = stats if stats is not None else CollectStats()
    rows = [
        _Row(task=task, group=g, sample=k, seed=_row_seed(seed, step, task.index, repeat, k))
        for g, (task, repeat) in enumerate(_with_repeats(environment, tasks))
        for k in range(group)
    ]
    prompts: dict[int, np.ndarray] = {}
    for row in rows:
        if row.group not in prompts:
            prompts[row.group] = np.asarray(chat.encode_prompt(row.task.system, row.task.user), np.int32)
            if len(prompts[row.group]) + 2 > config.context:
                raise ConfigError(
                    f"prompt of task {row.task.index} has {len(prompts[row.group])} tokens, rollout.context is "
                    f"{config.context}: raise it"
                )
        row.append(prompts[row.group], PROMPT_TURN)
    ended = 0
    with WorkerPool(workers or config.tool_workers) as pool:
        for begin in range(0, len(rows), config.slots):
            wave = rows[begin : begin + config.slots]
            report = (lambda n, before=ended: progress(before + n, len(rows))) if progress else None
            _Wave(generator, chat, environment, config, sampling, pool, stats, report).run(wave)
            ended += len(wave)
    stats.total += time.perf_counter() - start
    return [row.trajectory(sampling.trainable) for row in rows]


def metrics(trajectories: Sequence[Trajectory], stats: CollectStats | None = None) -> dict[str, float]:
    """Means over trajectories, shares of each status, and seconds by phase when `stats` are given."""
    n = max(len(trajectories), 1)
    counts = Counter(t.status for t in trajectories)
    result = {
        "trajectories": float(len(trajectories)),
        "reward": sum(t.reward for t in trajectories) / n,
        "tool_calls": sum(t.tool_calls for t in trajectories) / n,
        "turns": sum(len(t.versions) for t in trajectories) / n,
        "length": sum(len(t) for t in trajectories) / n,
        "sampled_tokens": float(sum(t.sampled_tokens for t in trajectories)),
        "tokens": float(sum(len(t) for t in trajectories)),
    }
    result |= {f"status/{name}": counts[name] / n for name in STATUSES}
    if stats is not None:
        result |= {
            "seconds/prefill": stats.prefill,
            "seconds/decode": stats.decode,
            "seconds/tools": stats.tools,
            "seconds/total": stats.total,
            "decode_tokens_per_second": result["sampled_tokens"] / stats.decode if stats.decode else 0.0,
        }
    return result


def _row_seed(seed: int, step: int, task: int, repeat: int, sample: int) -> int:
    return int(np.random.SeedSequence([seed, step, task, repeat, sample]).generate_state(1, np.uint64)[0])


def _with_repeats(environment: Environment, tasks: Sequence[Task | int]) -> list[tuple[Task, int]]:
    """Each task with how often it was named before."""
    seen: Counter[int] = Counter()
    result = []
    for entry in tasks:
        task = environment.task(int(entry)) if isinstance(entry, int | np.integer) else entry
        result.append((task, seen[task.index]))
        seen[task.index] += 1
    return result


@dataclass
class _Row:
    """A trajectory while it grows."""

    task: Task
    group: int
    sample: int
    seed: int
    pieces: list[tuple[np.ndarray, np.ndarray | None, int]] = field(default_factory=list)  # ids, logprobs, turn
    length: int = 0
    versions: list[int] = field(default_factory=list)
    tool_calls: int = 0
    answer: str | None = None
    status: str | None = None  # None while it goes on
    seconds: float = 0.0  # of sampling and of its own tool calls
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    episode: Future[Episode] | None = None
    hung: bool = False  # a tool call of it never returned

    def append(self, ids: np.ndarray, turn: int, logprobs: np.ndarray | None = None) -> None:
        self.pieces.append((ids, logprobs, turn))
        self.length += len(ids)

    def trajectory(self, trainable: bool) -> Trajectory:
        sampled = [logprobs is not None for _, logprobs, _ in self.pieces]
        lengths = [len(ids) for ids, _, _ in self.pieces]
        withheld = 1.0 if trainable else np.nan
        logprobs = [np.zeros(len(ids)) if values is None else values * withheld for ids, values, _ in self.pieces]
        return Trajectory(
            ids=np.concatenate([ids for ids, _, _ in self.pieces]).astype(np.int32),
            loss_mask=np.repeat(sampled, lengths),
            logprobs=np.concatenate(logprobs).astype(np.float32),
            turn_index=np.repeat(np.asarray([turn for _, _, turn in self.pieces], np.int32), lengths),
            versions=tuple(self.versions),
            status=self.status,
            task_index=int(self.task.index),
            group=self.group,
            sample=self.sample,
            reward=self.reward,
            rewards=self.rewards,
            tool_calls=self.tool_calls,
            answer=self.answer,
            info=self.info,
            labels=dict(self.task.labels),
        )


class _Wave:
    """Rows that are generated together."""

    def __init__(self, generator, chat, environment, config, sampling, pool, stats, report):
        self.generator, self.chat, self.environment, self.config = generator, chat, environment, config
        self.sampling, self.pool, self.stats, self.report = sampling, pool, stats, report

    def run(self, rows: list[_Row]) -> None:
        opener = ThreadPoolExecutor(1, thread_name_prefix="rollout-open")
        try:
            for row in rows:  # databases open while the first turn is sampled
                row.episode = opener.submit(self.environment.open, row.task)
            seeds = np.asarray([row.seed for row in rows], np.uint64)
            self.generator.begin([row.pieces[0][0] for row in rows], seeds, self.sampling)
            for turn in range(self.config.max_turns):
                active = [i for i, row in enumerate(rows) if row.status is None]
                if not active:
                    break
                self._turn(rows, np.asarray(active), turn)
                if self.report:
                    self.report(sum(row.status is not None for row in rows))
            self._grade(rows)
        finally:
            opener.shutdown(wait=False, cancel_futures=True)
            for row in rows:
                if not row.hung:  # the pool closes those whose call still runs
                    _close(row.episode)
                row.episode = None

    def _turn(self, rows: list[_Row], active: np.ndarray, turn: int) -> None:
        """Samples one turn of each active row, runs its tool call, appends the observation."""
        config = self.config
        limits = np.asarray([min(config.max_turn_tokens, config.context - rows[i].length) for i in active])
        before = dict(getattr(self.generator, "seconds", {}))
        version = self.generator.version  # before sampling: the oldest that a token of this turn can come from
        start = time.perf_counter()
        turns = self.generator.sample_turn(active, limits)
        sampling_seconds = time.perf_counter() - start
        spent = getattr(self.generator, "seconds", {"decode": sampling_seconds})
        self.stats.prefill += spent.get("prefill", 0.0) - before.get("prefill", 0.0)
        self.stats.decode += spent.get("decode", 0.0) - before.get("decode", 0.0)
        calls: dict[int, Call] = {}
        for i, sampled in zip(active.tolist(), turns, strict=True):
            row = rows[i]
            row.seconds += sampling_seconds
            row.append(np.asarray(sampled.ids, np.int32), turn, np.asarray(sampled.logprobs, np.float32))
            row.versions.append(version)
            code = self._read(row, sampled, turn)
            if code is not None:
                calls[i] = self._call(row, code, turn)
        start = time.perf_counter()
        self.pool.run(list(calls.values()))
        self.stats.tools += time.perf_counter() - start
        extended = [(i, ids) for i, call in calls.items() if (ids := self._observe(rows[i], call, turn)) is not None]
        if extended:
            self.generator.extend(np.asarray([i for i, _ in extended]), [ids for _, ids in extended])

    def _read(self, row: _Row, sampled: SampledTurn, turn: int) -> str | None:
        """Code of the tool call; None when the turn ended the trajectory, whose status is then set."""
        if not sampled.stopped:
            row.status = "truncated"
            return None
        parsed = self.chat.parse_turn(sampled.ids.tolist())
        if parsed.kind == "answer":
            row.answer, row.status = parsed.text, "finished"
        elif parsed.kind != "call":
            row.status = "malformed"
        elif turn + 1 == self.config.max_turns:  # no turn left to answer in
            row.status = "truncated"
        elif row.seconds >= self.config.trajectory_seconds:
            row.status = "timed_out"
        return parsed.text if row.status is None else None

    def _call(self, row: _Row, code: str, turn: int) -> Call:
        row.tool_calls += 1
        episode, final = row.episode, turn + 2 == self.config.max_turns

        def run() -> Observation:
            return episode.result().step(code, final_turn=final)

        return Call(run, self.config.trajectory_seconds - row.seconds, cleanup=lambda: _close(episode))

    def _observe(self, row: _Row, call: Call, turn: int) -> np.ndarray | None:
        """Appends what the tool answered; None when the trajectory ended instead."""
        row.seconds += call.seconds
        if call.abandoned:
            row.status, row.hung = "timed_out", True
        elif call.error is not None:
            row.status = "tool_failure"
            row.info["error"] = f"{type(call.error).__name__}: {call.error}"
        elif call.value.status == "tool_failure":
            row.status = "tool_failure"
            row.info["error"] = call.value.text
        if row.status is not None:
            return None
        ids = np.asarray(self.chat.encode_observation(call.value.text), np.int32)
        if row.length + len(ids) >= self.config.context:  # no room for a single token after it
            row.status = "truncated"
            return None
        row.append(ids, turn)
        return ids

    def _grade(self, rows: list[_Row]) -> None:
        for row in rows:
            if row.status in ("timed_out", "tool_failure"):
                continue
            try:
                reward = row.episode.result(self.config.trajectory_seconds).grade(row.answer or "")
            except Exception as error:
                row.status = "tool_failure"
                row.info["error"] = f"{type(error).__name__}: {error}"
                continue
            row.info |= reward.info
            finished = row.status == "finished"
            row.reward = float(reward.total) if finished else 0.0
            row.rewards = {name: float(value) if finished else 0.0 for name, value in reward.parts.items()}


def _close(episode: Future[Episode] | None) -> None:
    """Closes an episode, if it was opened; what goes wrong while closing concerns nobody any more."""
    if episode is None or episode.cancelled() or not episode.done() or episode.exception() is not None:
        return
    try:
        episode.result().close()
    except Exception:
        return
