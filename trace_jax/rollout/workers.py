"""Threads that run calls under a deadline each and deliver them when they end.

Python cannot stop a thread, so a call that overruns is abandoned: its caller hears of it at once, a fresh thread takes
its place, and whatever the call holds is cleaned up when (if) it returns. One hung tool therefore ends one trajectory,
not the run.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# A call that has run this long no longer holds a worker's place, so that a few slow calls do not hold up the others.
STALL_SECONDS = 10.0
# Threads of the whole process that calls hold without a place. Beyond it nothing replaces them: calls then wait in the
# queue, whose bound ends them, until some of the stuck ones return.
MOST_STUCK = 512


@dataclass(eq=False)
class Call:
    """One call and what became of it.

    Attributes:
      run: the work; whatever it raises ends up in `error`.
      deliver: called once with this call, from any thread, when it is done, hung or expired; never when it is dropped.
      deadline: moment of `time.monotonic` at which it is given up, waiting or running.
      queue_seconds: longest wait for a worker. run_seconds: longest run.
      cleanup: takes the value of a call that returned after it was given up.
      state: "waiting", "running", "done", "hung" (it ran for too long), "expired" (it waited too long) or
        "dropped" (nobody wants it any more).
      waited: seconds in the queue. seconds: seconds since a thread took it up.
    """

    run: Callable[[], Any]
    deliver: Callable[[Call], None]
    deadline: float = math.inf
    queue_seconds: float = math.inf
    run_seconds: float = math.inf
    cleanup: Callable[[Any], None] = lambda value: None
    state: str = "waiting"
    value: Any = None
    error: BaseException | None = None
    waited: float = 0.0
    seconds: float = 0.0
    submitted: float = 0.0
    started: float = 0.0
    replaced: bool = False  # its thread has lost its place

    @property
    def wait_until(self) -> float:
        """Moment at which it has waited too long."""
        return min(self.deadline, self.submitted + self.queue_seconds)

    @property
    def run_until(self) -> float:
        """Moment at which it has run too long."""
        return min(self.deadline, self.started + self.run_seconds)


def _nobody(call: Call) -> None:
    """Takes a call whose end nobody waits for."""


def _deliver(call: Call) -> None:
    """Tells whoever asked, and forgets them: a thread that is stuck in the call must not keep their memory."""
    deliver, call.deliver = call.deliver, _nobody
    deliver(call)


@dataclass(eq=False)
class _Lane:
    """Calls of one kind and the threads that serve them."""

    name: str
    workers: int
    ready: threading.Condition
    waiting: deque[Call] = field(default_factory=deque)
    running: dict[Call, threading.Thread] = field(default_factory=dict)
    threads: set[threading.Thread] = field(default_factory=set)
    places: int = 0  # threads that are idle or in a call that has not lost them their place
    idle: int = 0


class _Stuck:
    """Counts the threads of the process that calls hold without a place."""

    def __init__(self):
        self._lock = threading.Lock()
        self.count = 0

    def take(self, most: float = math.inf) -> bool:
        with self._lock:
            if self.count >= most:
                return False
            self.count += 1
            return True

    def give(self) -> None:
        with self._lock:
            self.count -= 1


_STUCK = _Stuck()


def stuck_threads() -> int:
    """Threads of this process that are held by calls which ran for `STALL_SECONDS` or were given up, at the moment."""
    return _STUCK.count


class WorkerPool:
    """Lanes of worker threads under one watchdog. Threads start when there is work for them."""

    def __init__(self, lanes: Mapping[str, int], *, most_stuck: int = MOST_STUCK):
        """`lanes`: threads of each kind of call. `most_stuck`: see `MOST_STUCK`."""
        self._lock = threading.Lock()
        self._tick = threading.Condition(self._lock)  # the watchdog's next look has come nearer
        self._lanes = {name: _Lane(name, workers, threading.Condition(self._lock)) for name, workers in lanes.items()}
        self._most_stuck = most_stuck
        self._closed = False
        self._look_at = -math.inf
        self._watchdog = threading.Thread(target=self._watch, name="rollout-watchdog", daemon=True)
        self._watchdog.start()

    def submit(self, lane: str, call: Call) -> None:
        """Queues a call. Calls of a lane are taken up in the order they were submitted in."""
        with self._lock:
            call.submitted = time.monotonic()
            self._lanes[lane].waiting.append(call)
            self._lanes[lane].ready.notify()
            self._staff(self._lanes[lane])
            self._look_by(call.wait_until)

    def drop(self, lane: str, call: Call) -> bool:
        """Forgets a call unless a thread has taken it up; whether it was forgotten."""
        with self._lock:
            if call.state != "waiting":
                return False
            self._lanes[lane].waiting.remove(call)
            call.state = "dropped"
            return True

    def close(self, grace: float = 2.0) -> None:
        """Drops what waits and ends the threads. Calls that still run after `grace` seconds are hung from then on."""
        with self._lock:
            self._closed = True
            leaving = []
            for lane in self._lanes.values():
                for call in lane.waiting:
                    call.state = "dropped"
                lane.waiting.clear()
                lane.ready.notify_all()
                given_up = {thread for call, thread in lane.running.items() if call.state == "hung"}
                leaving += lane.threads - given_up
            self._tick.notify()
        self._watchdog.join()
        until = time.monotonic() + grace
        for thread in leaving:
            thread.join(max(until - time.monotonic(), 0.0))
        with self._lock:
            for lane in self._lanes.values():
                for call in list(lane.running):
                    self._give_up(call)
                    call.deliver = _nobody
                    if not call.replaced:
                        self._displace(lane, call, math.inf)

    def _staff(self, lane: _Lane) -> None:
        """Starts threads for calls that no idle thread will take."""
        while not self._closed and lane.places < lane.workers and len(lane.waiting) > lane.idle:
            thread = threading.Thread(target=self._work, args=(lane,), name=f"rollout-{lane.name}", daemon=True)
            try:
                thread.start()  # it waits for the lock that is held here
            except RuntimeError:  # the system gives no more threads: the calls wait, and the queue's bound ends them
                return
            lane.places += 1
            lane.idle += 1  # it has not looked yet
            lane.threads.add(thread)

    def _work(self, lane: _Lane) -> None:
        while self._serve(lane):
            pass

    def _serve(self, lane: _Lane) -> bool:
        """Runs one call; whether the thread goes on. A frame of its own, so that an idle thread holds no old call."""
        with self._lock:
            while not lane.waiting and not self._closed:
                lane.ready.wait()
            lane.idle -= 1
            if not lane.waiting:
                lane.threads.discard(threading.current_thread())
                return False
            call = lane.waiting.popleft()
            call.state, call.started = "running", time.monotonic()
            call.waited = call.started - call.submitted
            lane.running[call] = threading.current_thread()
            self._look_by(min(call.run_until, call.started + STALL_SECONDS))
        value, error = None, None
        try:
            value = call.run()
        except BaseException as raised:  # an extension's panic is no Exception, and would end the thread unnoticed
            error = raised
        with self._lock:
            late = call.state == "hung"
            if not late:
                call.state, call.value, call.error = "done", value, error
                call.seconds = time.monotonic() - call.started
        if late:
            with contextlib.suppress(Exception):
                call.cleanup(value)
        else:
            _deliver(call)
        with self._lock:
            lane.running.pop(call, None)
            if not call.replaced:
                lane.idle += 1
                return True
            _STUCK.give()
            lane.threads.discard(threading.current_thread())
            self._look_by(-math.inf)  # somebody else may be replaced now
            return False

    def _look_by(self, moment: float) -> None:
        """Makes sure that the watchdog looks at that moment."""
        if moment < self._look_at:
            self._look_at = moment
            self._tick.notify()

    def _watch(self) -> None:
        while not self._closed:
            with self._lock:
                ended, self._look_at = self._enforce()
                if not ended and not self._closed:
                    left = self._look_at - time.monotonic()
                    self._tick.wait(None if math.isinf(left) else max(left, 0.0))
            while ended:
                _deliver(ended.pop(0))

    def _enforce(self) -> tuple[list[Call], float]:
        """Ends calls over their limits, replaces the threads of stalled ones. Returns the ended ones and the moment of
        the next look."""
        now, soonest, ended = time.monotonic(), math.inf, []
        for lane in self._lanes.values():
            for call in [call for call in lane.waiting if call.wait_until <= now]:
                lane.waiting.remove(call)
                call.state, call.waited = "expired", now - call.submitted
                ended.append(call)
            for call in list(lane.running):
                if call.run_until <= now and self._give_up(call):
                    ended.append(call)
                stalls = min(call.run_until, call.started + STALL_SECONDS)
                if stalls <= now and not call.replaced:
                    self._displace(lane, call, self._most_stuck)
                soonest = min([soonest, *(moment for moment in (stalls, call.run_until) if moment > now)])
            soonest = min([soonest, *(call.wait_until for call in lane.waiting)])
            self._staff(lane)
        return ended, soonest

    def _give_up(self, call: Call) -> bool:
        """Marks a running call as hung; whether it was running."""
        if call.state != "running":
            return False
        call.state, call.seconds = "hung", time.monotonic() - call.started
        return True

    def _displace(self, lane: _Lane, call: Call, most: float) -> None:
        """Takes its place from a call's thread, unless too many threads are stuck already."""
        if _STUCK.take(most):
            call.replaced = True
            lane.places -= 1
