"""What each step works on, as pure functions of (seed, step): a resumed run meets the same items in the same order."""

from __future__ import annotations

import functools
import zlib

import numpy as np
from jaxtyping import Int


def stream(seed: int, *path: int | str) -> np.random.Generator:
    """An independent random stream for a purpose named by `path`."""
    return np.random.default_rng([seed, *(zlib.crc32(p.encode()) if isinstance(p, str) else p for p in path)])


@functools.lru_cache(maxsize=8)
def _epoch(seed: int, purpose: str, epoch: int, count: int) -> Int[np.ndarray, " count"]:
    return stream(seed, purpose, epoch).permutation(count)


def shuffled(seed: int, purpose: str, start: int, stop: int, count: int) -> list[int]:
    """Items `start..stop` of an endless sequence in which every `count` consecutive items are a new permutation."""
    return [int(_epoch(seed, purpose, k // count, count)[k % count]) for k in range(start, stop)]


def sft_steps(count: int, batch: int, epochs: int) -> int:
    """Optimizer steps of SFT: whole batches in `epochs` passes over `count` items."""
    return count * epochs // batch


def sft_batch(seed: int, step: int, batch: int, count: int) -> list[int]:
    """Items of SFT step `step` (from 0)."""
    return shuffled(seed, "sft", step * batch, (step + 1) * batch, count)


def grpo_prompts(
    seed: int, step: int, prompts: int, count: int, no_signal: list[int], no_signal_share: float
) -> list[int]:
    """Episodes that GRPO step `step` (from 0) samples groups for.

    Args:
        count: episodes in the split, at least `prompts`.
        no_signal: those of them without a signal, and the share of the prompts, on average over steps, that is drawn
            from them alone. An episode is not drawn so in a step that has it already, where its second group would be
            sampled with the keys of the first: another one takes its place, without a signal as long as there is one.
    """
    before, after = (round(no_signal_share * prompts * s) if no_signal else 0 for s in (step, step + 1))
    chosen = shuffled(seed, "grpo", step * prompts - before, (step + 1) * prompts - after, count)
    if after == before:
        return chosen
    usual = set(chosen)
    drawn = [no_signal[i] for i in shuffled(seed, "grpo-no-signal", before, after, len(no_signal))]
    more = list(dict.fromkeys(p for p in drawn if p not in usual))
    for others in (no_signal, range(count)):
        if missing := after - before - len(more):
            free = sorted(set(others) - usual - set(more))
            order = stream(seed, "grpo-no-signal-instead", step).permutation(len(free))
            more += [free[i] for i in order[:missing]]
    return chosen + more


def curriculum(step: int, steps: int, stages: int, count: int) -> tuple[int, int, int]:
    """Where GRPO step `step` of `steps` finds its prompts when a split consists of `stages` equal parts in that order.

    Returns:
        first and past-the-last episode of the part, and the first step that uses it.
    """
    stage = min(step * stages // max(steps, 1), stages - 1)
    low, high = (count * i // stages for i in (stage, stage + 1))
    return low, high, -(-stage * steps // stages)


def collection_seed(seed: int, purpose: str, step: int) -> int:
    """Seed of the sampling keys of one collection."""
    return int(stream(seed, purpose, step).integers(2**31 - 1))
