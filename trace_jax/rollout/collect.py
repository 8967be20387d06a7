"""Collection of trajectories: the policy samples turns, tools answer between them, the environment grades.

Token in, token out: a row is the prompt's ids, the sampled ids and the observations' ids, concatenated and never
encoded again. Each row goes its own way: its tool calls run in worker threads while others are sampled, and when it
ends the next one takes its slot. The result is a function of the policy, the tasks and the seeds: neither the number of
workers or slots nor the order in which turns and tools return changes it (time-outs aside).
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from trace_jax.config import RolloutConfig
from trace_jax.environments.base import Environment, Episode, Observation, Reward, Task
from trace_jax.rollout.collect_stats import CollectStats, metrics
from trace_jax.rollout.generator import Generator, SampledTurn
from trace_jax.rollout.row import Chat, Row, planned
from trace_jax.rollout.sampling import Sampling
from trace_jax.rollout.trajectory import Trajectory
from trace_jax.rollout.workers import Call, WorkerPool

__all__ = ["Chat", "CollectStats", "collect", "metrics"]

OPENED_AHEAD = 8  # episodes that are opened before their row has a slot
TICK_SECONDS = 1.0  # `progress` is called at least this often
_UNGRADED = ("timed_out", "tool_failure")


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
    hinted: int = 0,
    adapters: Sequence[int] | None = None,
    share: tuple[int, int] = (0, 1),
) -> list[Trajectory]:
    """Samples `group` trajectories of each task.

    Args:
      generator: the sampler, e.g. `engine.Engine`; its `slots` rows are in flight at once.
      chat: turn format.
      environment: opens episodes; `open` is called from a background thread, `step` from the tool threads, `grade` and
        `close` from another one.
      tasks: tasks, or their indices in the environment. A task that is named twice is sampled anew.
      group: trajectories a task.
      config: limits; its temperature and truncation unless `sampling` is given.
      seed: of the run. step: of the run; the two, the task, and the place in the group seed every trajectory.
      workers: tool threads, `config.tool_workers` by default.
      sampling: overrides temperature and truncation. Log-probabilities of a sampler that the learner does not reproduce
        are withheld as NaN.
      stats: filled with figures.
      hinted: members of each group that read the task's hint (`Task.hint`). It is taken out of their trajectories,
        whose log-probabilities are withheld as NaN.
      adapters: which of those that the generator holds samples each task, -1: none; by default the first.
      share: (which, of how many): only these of the rows, an even part of all in their order. The parts put together
        are what one call without it returns.
      progress: called with (trajectories ended, trajectories in all) when one has ended and at least every second. What
        it raises ends the collection.

    Returns:
      Trajectories ordered by task, then by place in the group.

    Raises:
      ConfigError: a prompt that leaves no room for a turn in `config.context`.
      BaseException: what the generator delivered or `progress` raised; every episode is closed by then, except of tool
        calls that do not return, which are closed when they do.
    """
    start = time.perf_counter()
    stats = stats if stats is not None else CollectStats()
    rows = planned(
        chat,
        environment,
        tasks,
        group=group,
        context=config.context,
        seed=seed,
        step=step,
        hinted=hinted,
        adapters=adapters,
    )
    part, parts = share
    rows = rows[len(rows) * part // parts : len(rows) * (part + 1) // parts]
    for number, row in enumerate(rows):
        row.number = number
    sampling = sampling or Sampling.of(config)
    pool = WorkerPool({"tool": workers or config.tool_workers, "open": 1, "grade": 1})
    result = _Collection(generator, chat, environment, config, sampling, pool, stats, rows).run(progress)
    stats.close(time.perf_counter() - start)
    return result


class _Event(NamedTuple):
    """A call of a row that ended, and what to do about it."""

    handler: Callable[[Row, Call], None]
    row: Row
    call: Call


class _Collection:
    """The event loop. Its state belongs to the collecting thread; sampler and workers only put events in the queue.

    A row moves through the states of `Row.state`. While it has a slot, exactly one event is due for it: a turn, the
    opening of its episode, or the result of a tool call.
    """

    def __init__(
        self,
        generator: Generator,
        chat: Chat,
        environment: Environment,
        config: RolloutConfig,
        sampling: Sampling,
        pool: WorkerPool,
        stats: CollectStats,
        rows: list[Row | None],
    ):
        self.generator, self.chat, self.environment, self.config = generator, chat, environment, config
        self.sampling, self.pool, self.stats = sampling, pool, stats
        self.rows = rows  # None when over, so that nothing of it is kept
        self.results: list[Trajectory | None] = [None] * len(rows)
        self.events: queue.SimpleQueue[SampledTurn | BaseException | _Event] = queue.SimpleQueue()
        self.states = Counter({"unstarted": len(rows)})
        self.started = self.asked = 0  # rows with a slot so far; rows whose episode was asked for or is not needed
        self.episodes = 0  # asked for and not yet given back
        # Opening and grading wait for one thread, whatever the limits of a trajectory; but nothing waits for ever.
        self._background = {
            "queue_seconds": max(config.trajectory_seconds, config.tool_queue_seconds),
            "run_seconds": config.trajectory_seconds,
        }
        self.deadlines: deque[int] = deque()  # started rows; the limit is the same for all, so the first ends first

    def run(self, progress: Callable[[int, int], None] | None) -> list[Trajectory]:
        reported, moment = (-1, 0.0), time.monotonic()
        try:
            self.generator.begin(self.sampling, self.events.put)
            self._fill()
            while (ended := self.states["over"]) < len(self.rows):
                now = time.monotonic()
                if progress and (ended != reported[0] or now - reported[1] >= TICK_SECONDS):
                    reported = ended, now
                    progress(ended, len(self.rows))
                event = self._next(self._patience(now))
                now = time.monotonic()
                self.stats.spend(now - moment, self.states["sampling"] > 0, self.states["tool"] > 0)
                moment = now
                if isinstance(event, _Event):
                    event.handler(event.row, event.call)
                elif event is not None:
                    self._on_turn(event)
                self._expire(time.monotonic())
            if progress:
                progress(len(self.rows), len(self.rows))
        finally:
            self._close()
        return self.results

    def _next(self, patience: float) -> SampledTurn | BaseException | _Event | None:
        try:
            return self.events.get(timeout=patience)
        except queue.Empty:
            return None

    def _then(self, handler: Callable[[Row, Call], None], row: Row) -> Callable[[Call], None]:
        """Delivers a call of a row to the event loop."""
        return lambda call: self.events.put(_Event(handler, row, call))

    # Slots

    def _fill(self) -> None:
        """Starts rows as long as a slot is free, and opens episodes of those started or about to start."""
        while self.started < len(self.rows) and self._held() < self.generator.slots:
            row = self.rows[self.started]
            self.started += 1
            row.deadline = time.monotonic() + self.config.trajectory_seconds
            self.deadlines.append(row.number)
            self._move(row, "sampling")
            self.generator.start(row.number, row.pieces[0].ids, row.seed, self._limit(row), row.adapter)
        self._open()

    def _held(self) -> int:
        return self.states["sampling"] + self.states["opening"] + self.states["tool"]

    def _move(self, row: Row, state: str) -> None:
        self.states[row.state] -= 1
        self.states[state] += 1
        row.state = state

    def _limit(self, row: Row) -> int:
        return min(self.config.max_turn_tokens, self.config.context - row.length)

    def _patience(self, now: float) -> float:
        """Seconds until something is due even if nothing happens."""
        first = self.rows[self.deadlines[0]] if self.deadlines else None
        return TICK_SECONDS if first is None else min(max(first.deadline - now, 0.0), TICK_SECONDS)

    def _expire(self, now: float) -> None:
        """Ends rows whose time is up at the sampler or at the opener. Tool calls have the same deadline at the workers,
        which tell whether a thread still holds the episode."""
        while self.deadlines:
            row = self.rows[self.deadlines[0]]
            if row is not None and row.status is None:
                if row.deadline > now:
                    return
                if row.state in ("sampling", "opening"):
                    self._time_out(row, f"while it was {row.state}")
            self.deadlines.popleft()

    def _time_out(self, row: Row, where: str) -> None:
        row.fail("timed_out", f"the trajectory took longer than {self.config.trajectory_seconds:g} s {where}")
        self._end(row)

    # Turns and tool calls

    def _on_turn(self, turn: SampledTurn | BaseException) -> None:
        if isinstance(turn, BaseException):
            raise turn
        row = self.rows[turn.row]
        if row is None or row.status is not None:
            return  # given up in the middle of this turn
        if row.state != "sampling":
            raise RuntimeError(f"the sampler delivered a turn of row {turn.row}, which asked for none")
        row.turn(turn)
        row.status = self._read(row, turn)
        if row.status is not None:
            self._end(row)
        elif time.monotonic() >= row.deadline:
            self._time_out(row, "of sampling")
        else:
            row.tool_calls += 1
            self._move(row, "opening")
            self._call(row)

    def _read(self, row: Row, turn: SampledTurn) -> str | None:
        """Status that the turn gives the trajectory; None for a tool call, whose code is kept."""
        if not turn.stopped:
            return "truncated"
        parsed = self.chat.parse_turn(np.asarray(turn.ids).tolist())
        if parsed.kind == "answer":
            row.answer = parsed.text
            return "finished"
        if parsed.kind != "call":
            return "malformed"
        row.code = parsed.text
        return "truncated" if len(row.versions) == self.config.max_turns else None  # no turn left to answer in

    def _call(self, row: Row) -> None:
        """Hands the tool call to the workers once the episode is open."""
        if not row.opened:
            return
        if row.episode is None:
            self._refuse(row)
            self._end(row)
            return
        episode, final = row.episode, len(row.versions) + 1 == self.config.max_turns
        row.call = Call(
            partial(_step, episode, row.code, final, self.chat),
            self._then(self._on_tool, row),
            deadline=row.deadline,
            queue_seconds=self.config.tool_queue_seconds,
            cleanup=lambda _: _close(episode),
        )
        self._move(row, "tool")
        self.pool.submit("tool", row.call)

    def _on_tool(self, row: Row, call: Call) -> None:
        seen, ids = call.value if call.value is not None else (None, None)
        row.call = None
        self.stats.record(call, "tool_failure" if seen is None else seen.status)
        if call.state == "hung":
            row.episode = None  # closed by the abandoned thread
            self._time_out(row, "in a tool call, which has not returned")
        elif call.state == "expired" and call.wait_until < call.deadline:
            row.fail("timed_out", f"a tool call waited {call.waited:.3g} s for a worker (rollout.tool_queue_seconds)")
            self._end(row)
        elif call.state == "expired":
            self._time_out(row, "with a tool call that waited for a worker")
        elif call.error is not None:
            row.fail("tool_failure", _told(call.error))
            self._end(row)
        elif seen.status == "tool_failure":
            row.fail("tool_failure", seen.text)
            self._end(row)
        elif time.monotonic() >= row.deadline:
            self._time_out(row, "with its last tool call")
        elif row.length + len(ids) >= self.config.context:  # no room for a single token after it
            row.status = "truncated"
            self._end(row)
        else:
            row.observation(ids)
            self._move(row, "sampling")
            self.generator.resume(row.number, ids, self._limit(row))

    # Episodes

    def _open(self) -> None:
        """Asks for episodes in the order of rows, never for more than the slots and a few ahead."""
        most = self.generator.slots + OPENED_AHEAD
        while self.asked < min(len(self.rows), self.started + OPENED_AHEAD) and self.episodes < most:
            row = self.rows[self.asked]
            self.asked += 1
            if row is None or row.opened:
                continue  # it ended before anybody needed its episode
            self.episodes += 1
            row.opening = Call(
                partial(self.environment.open, row.task),
                self._then(self._on_open, row),
                cleanup=_close,
                **self._background,
            )
            self.pool.submit("open", row.opening)

    def _on_open(self, row: Row, call: Call) -> None:
        row.opened, row.episode, call.value = True, call.value, None
        if row.status is not None:
            self._wind_up(row)
        elif row.state == "opening":
            self._call(row)

    def _refuse(self, row: Row) -> None:
        """Ends a row that needs an episode which could not be opened."""
        if row.opening.error is None:
            row.fail("timed_out", f"its episode was not open after {self.config.trajectory_seconds:g} s")
        else:
            row.fail("tool_failure", _told(row.opening.error))

    # Ends

    def _end(self, row: Row) -> None:
        """Gives the slot of a row that has a status to the next one and grades the row in the background."""
        self.generator.release(row.number)
        self._move(row, "grading")
        self._wind_up(row)
        self._fill()

    def _wind_up(self, row: Row) -> None:
        """Grades a row that has ended and closes its episode, as soon as that is open."""
        if not row.opened:
            graded = row.status not in _UNGRADED
            if graded or not (row.opening is None or self.pool.drop("open", row.opening)):
                return  # `_on_open` comes back
            row.opened = True
        if row.episode is None:
            if row.status not in _UNGRADED:
                self._refuse(row)
            self._complete(row)
            return
        answer = None if row.status in _UNGRADED else row.answer or ""
        row.call = Call(partial(_grade, row.episode, answer), self._then(self._on_graded, row), **self._background)
        self.pool.submit("grade", row.call)

    def _on_graded(self, row: Row, call: Call) -> None:
        reward: Reward | None = call.value
        if reward is not None:
            row.grade(reward.total, reward.parts, reward.info)
        elif row.status not in _UNGRADED:
            late = f"grading took longer than {self.config.trajectory_seconds:g} s"
            row.fail("tool_failure", late if call.error is None else _told(call.error))
        if call.state == "expired":
            _close(row.episode)
        self._complete(row)

    def _complete(self, row: Row) -> None:
        self.episodes -= row.opening is not None
        row.opening = row.call = row.episode = None  # their callbacks refer to the row
        self.results[row.number] = row.trajectory(self.sampling.trainable)
        self.rows[row.number] = None
        self._move(row, "over")
        self._open()

    def _close(self) -> None:
        """Ends whatever still goes on; after a whole collection only threads wait to be sent home."""
        try:
            self.generator.end()
        finally:
            self.pool.close()
            for row in self.rows:
                if row is not None and (row.call is None or row.call.state != "hung"):
                    _close(row.episode or (row.opening and row.opening.value))


def _step(episode: Episode, code: str, final: bool, chat: Chat) -> tuple[Observation, Int[np.ndarray, " n"]]:
    """A tool call and the ids of its observation, which may be long."""
    seen = episode.step(code, final_turn=final)
    return seen, np.asarray(chat.encode_observation(seen.text), np.int32)


def _grade(episode: Episode, answer: str | None) -> Reward | None:
    """Grades an answer if there is one, and closes the episode."""
    try:
        return None if answer is None else episode.grade(answer)
    finally:
        _close(episode)


def _close(episode: Episode | None) -> None:
    """Closes an episode, if it was opened; what goes wrong while closing concerns nobody any more."""
    if episode is not None:
        with contextlib.suppress(Exception):
            episode.close()


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
