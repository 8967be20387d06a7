"""Where the time of a training step goes, how fast it learns, and what memory it holds. How to read them:
docs/metrics.md."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from trace_jax.config import PolicyConfig
from trace_jax.learner import flops
from trace_jax.rollout.collect_stats import CollectStats

PHASES = ("generate", "tools", "reward", "probe", "learn", "sync", "save", "validate", "wait")


class PhaseTimer:
    """Seconds by phase since the last `take`. Threads may book at the same time: phases that overlap in time are both
    counted in full, so the sum may exceed the time that passed."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Books the time inside the block, also when it raises; traces of `--profile` show it by its name.

        Raises:
            ValueError: no such phase.
        """
        start = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Books seconds measured elsewhere. ValueError: no such phase."""
        if name not in PHASES:
            raise ValueError(f"no phase {name!r}: one of {', '.join(PHASES)}")
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def collected(self, stats: CollectStats) -> None:
        """Books a finished collection: sampling as `generate`, calls as `tools` (the two overlap), and what was left
        when neither was going on, the last answers' grading, as `reward`."""
        self.add("generate", stats.sampling)
        self.add("tools", stats.tools)
        self.add("reward", max(stats.total - stats.sampling - stats.tools_alone, 0.0))

    def take(self) -> dict[str, float]:
        """`seconds/<phase>` of every phase booked so far in the life of the timer, and starts again from zero."""
        with self._lock:
            taken = {f"seconds/{name}": self._seconds[name] for name in PHASES if name in self._seconds}
            self._seconds = dict.fromkeys(self._seconds, 0.0)
        return taken


def throughput(
    seconds: float, lengths: Sequence[int], passes: int, policy: PolicyConfig, vocab_size: int, devices: int
) -> dict[str, float]:
    """Speed of the learner in one step.

    Args:
        seconds: spent in optimizer steps.
        lengths: tokens of each sequence that was learned from. passes: optimizer steps on them.
        devices: that the learner runs on.

    Returns:
        `learn_tokens_per_second` (tokens that are not padding; empty without any) and, on devices whose peak is known,
        `mfu`: the share of it that model FLOPs reach (PaLM, arXiv 2204.02311, appendix B).
    """
    tokens = passes * sum(lengths)
    if not tokens or seconds <= 0:
        return {}
    rate, peak = tokens / seconds, flops.peak()
    result = {"learn_tokens_per_second": rate}
    if peak is not None:
        each = flops.flops_per_token(policy, vocab_size, flops.attended(lengths))
        result["mfu"] = rate * each / (peak * devices)
    return result


def memory(devices: Sequence[Any] | None = None) -> dict[str, float]:
    """Bytes held now and at most, of the fullest of the local devices; on backends that do not say (CPU) the most that
    this process ever had resident."""
    found = [stats for device in devices or jax.local_devices() if (stats := device.memory_stats())]
    names = {"memory/bytes_in_use": "bytes_in_use", "memory/peak_bytes": "peak_bytes_in_use"}
    result = {name: float(max(s[key] for s in found)) for name, key in names.items() if found and key in found[0]}
    return result or _resident()


def _resident() -> dict[str, float]:
    try:
        import resource
    except ImportError:  # not a Unix
        return {}
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory/host_rss": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
