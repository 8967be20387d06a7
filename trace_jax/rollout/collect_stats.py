"""Figures of a collection: where the time went, how tool calls went, how trajectories ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trace_jax.rollout.trajectory import STATUSES, Trajectory
from trace_jax.rollout.workers import Call, stuck_threads


@dataclass
class CollectStats:
    """What a collection spent. Add several collections by passing the same object.

    Attributes:
      sampling: wall-clock seconds in which some row was at the sampler. tools: in which some tool call waited or ran.
      tools_alone: in which some did and no row was at the sampler, i.e. what sampling did not hide. total: all.
      calls: tool calls, however they ended. errors: answered with an error of the agent's code. timeouts: stopped by
        the tool's own limit. failures: the tool itself broke. hung: did not return before the trajectory's limit.
        expired: found no worker in time.
      waited: seconds that calls waited for a worker, in sum. waited_most: the longest wait.
      ran: seconds that calls ran, in sum. ran_most: the longest.
      stuck: threads of the process that tool calls held without a worker's place when the last collection ended.
    """

    sampling: float = 0.0
    tools: float = 0.0
    tools_alone: float = 0.0
    total: float = 0.0
    calls: int = 0
    errors: int = 0
    timeouts: int = 0
    failures: int = 0
    hung: int = 0
    expired: int = 0
    waited: float = 0.0
    waited_most: float = 0.0
    ran: float = 0.0
    ran_most: float = 0.0
    stuck: int = 0

    def spend(self, seconds: float, sampling: bool, tools: bool) -> None:
        """Books a stretch of time in which rows were at the sampler, in tool calls, both or neither."""
        self.sampling += seconds * sampling
        self.tools += seconds * tools
        self.tools_alone += seconds * (tools and not sampling)

    def record(self, call: Call, status: str) -> None:
        """Books a tool call that ended; `status` is that of its observation, "tool_failure" without one."""
        self.calls += 1
        self.waited += call.waited
        self.waited_most = max(self.waited_most, call.waited)
        self.ran += call.seconds
        self.ran_most = max(self.ran_most, call.seconds)
        if call.state in ("hung", "expired"):
            self.hung += call.state == "hung"
            self.expired += call.state == "expired"
        else:
            self.errors += status == "error"
            self.timeouts += status == "timeout"
            self.failures += status == "tool_failure"

    def add(self, other: CollectStats) -> None:
        """Books what another collection, after this one, spent."""
        for name, value in vars(other).items():
            if name == "stuck":
                self.stuck = value
            else:
                mine = getattr(self, name)
                setattr(self, name, max(mine, value) if name.endswith("_most") else mine + value)

    def close(self, seconds: float) -> None:
        """Books a whole collection."""
        self.total += seconds
        self.stuck = stuck_threads()


def side_by_side(parts: Sequence[CollectStats]) -> CollectStats:
    """Of parts of one collection that ran at the same time: of wall-clock seconds the longest, of the rest the sum."""
    most = ("sampling", "tools", "tools_alone", "total", "waited_most", "ran_most")
    return CollectStats(
        **{name: (max if name in most else sum)(getattr(p, name) for p in parts) for name in vars(parts[0])}
    )


def metrics(trajectories: Sequence[Trajectory], stats: CollectStats | None = None) -> dict[str, float]:
    """Means over trajectories, shares of each status and of stale turns; tool calls and seconds when `stats` are
    given."""
    n = max(len(trajectories), 1)
    counts = Counter(t.status for t in trajectories)
    turns = sum(len(t.versions) for t in trajectories)
    result = {
        "trajectories": float(len(trajectories)),
        "reward": sum(t.reward for t in trajectories) / n,
        "tool_calls": sum(t.tool_calls for t in trajectories) / n,
        "turns": turns / n,
        "stale_turns": sum(sum(t.stale) for t in trajectories) / max(turns, 1),
        "length": sum(len(t) for t in trajectories) / n,
        "sampled_tokens": float(sum(t.sampled_tokens for t in trajectories)),
        "tokens": float(sum(len(t) for t in trajectories)),
    }
    result |= {f"status/{name}": counts[name] / n for name in STATUSES}
    if stats is not None:
        names = ("calls", "errors", "timeouts", "failures", "hung", "expired")
        result |= {f"tools/{name}": float(getattr(stats, name)) for name in names}
        calls = max(stats.calls, 1)
        result |= {
            "tools/queue_seconds_mean": stats.waited / calls,
            "tools/queue_seconds_max": stats.waited_most,
            "tools/seconds_mean": stats.ran / calls,
            "tools/seconds_max": stats.ran_most,
            "tools/stuck_threads": float(stats.stuck),
            "seconds/sampling": stats.sampling,
            "seconds/tools": stats.tools,
            "seconds/tools_alone": stats.tools_alone,
            "seconds/total": stats.total,
            "sampled_tokens_per_second": result["sampled_tokens"] / stats.sampling if stats.sampling else 0.0,
        }
    return result
