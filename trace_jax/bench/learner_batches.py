"""What the learner benchmark learns from: token sequences of real lengths, in the forms that batches can have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from trace_jax.config import BatchConfig
from trace_jax.learner import packing
from trace_jax.learner.packing import LearnerBatch

# Tokens of an investigation: 40 quantiles (1/80, 3/80, ...) of the 51,200 trajectories that the nano recipe learned
# from in 200 GRPO steps. Their mean is 107, the longest had 224, which the quantiles leave out: padding to the longest
# costs a little more than it does here. 39 % of the tokens were sampled.
LENGTHS = (
    *(52, 55, 74, 91, 94, 95, 96, 96, 97, 98, 100, 101, 102, 104, 105, 106, 107, 107, 108, 108),
    *(109, 109, 110, 110, 111, 111, 112, 113, 113, 114, 115, 116, 117, 119, 124, 127, 129, 132, 136, 145),
)
TRAINED = 0.39
OLD_NOISE = 0.2  # nats between behaviour and policy: enough for the clip to take some tokens


@dataclass(frozen=True)
class Shape:
    """Positions of micro-batches.

    Attributes:
        rows, row_length: of the micro-batch in which every row is one sequence of full length.
        packed_rows, packed_length: of those that real sequences are packed into; padded ones have no more positions.
        microbatches: of packed rows.
    """

    rows: int = 32
    row_length: int = 512
    packed_rows: int = 8
    packed_length: int = 256
    microbatches: int = 8

    @property
    def budget(self) -> int:
        """Positions of a micro-batch of real sequences, whatever its form."""
        return self.packed_rows * self.packed_length


def full(shape: Shape, vocab_size: int, seed: int) -> list[LearnerBatch]:
    """Random sequences that fill one micro-batch without any padding."""
    sequences = _random([shape.row_length] * shape.rows, vocab_size, seed)
    return packing.pack(sequences, shape.row_length, shape.rows)


def real(shape: Shape, vocab_size: int, seed: int) -> list[packing.Sequence]:
    """Random sequences of real lengths, as many as the packed rows hold."""
    rng = np.random.default_rng(seed)
    scale = min(1.0, shape.packed_length / max(LENGTHS))
    lengths: list[int] = []
    rows = shape.packed_rows * shape.microbatches
    while max((row for row, _ in packing.layout(lengths, shape.packed_length)), default=0) < rows:
        lengths.append(max(2, int(scale * rng.choice(LENGTHS))))
    return _random(lengths[:-1], vocab_size, seed)


def packed(sequences: Sequence[packing.Sequence], shape: Shape) -> list[LearnerBatch]:
    """Several to a row."""
    return packing.pack(sequences, shape.packed_length, shape.packed_rows)


def bucketed(sequences: Sequence[packing.Sequence], shape: Shape) -> list[LearnerBatch]:
    """Several to a row, in rows of half the length where the sequences are short."""
    buckets = (shape.packed_length // 2,)
    return packing.pack_buckets(sequences, BatchConfig(shape.packed_length, shape.packed_rows, buckets))


def padded(sequences: Sequence[packing.Sequence], shape: Shape) -> list[LearnerBatch]:
    """One to a row, all as long as the longest, spread evenly over as few micro-batches as their positions need."""
    longest = max(map(len, sequences))
    batches = math.ceil(len(sequences) / max(1, shape.budget // longest))
    rows = math.ceil(len(sequences) / batches)
    each = [packing.pack([s], longest, 1)[0] for s in sequences]
    each += [packing.empty_batch(longest, 1)] * (rows * batches - len(each))
    return [jax.tree.map(lambda *a: np.concatenate(a), *each[b : b + rows]) for b in range(0, len(each), rows)]


def with_noisy_old(
    batches: Sequence[LearnerBatch], score: Callable[[Sequence[LearnerBatch]], Sequence[np.ndarray]], seed: int
) -> list[LearnerBatch]:
    """The batches with the policy's own log-probs and some noise as those of the sampler."""
    rng = np.random.default_rng(seed)

    def near(batch, logprobs):
        old = (logprobs + OLD_NOISE * rng.standard_normal(logprobs.shape)).astype(np.float32)
        return replace(batch, old_logprobs=old, behaviour_logprobs=old)

    return [near(b, s) for b, s in zip(batches, score(batches), strict=True)]


def tokens(batches: Sequence[LearnerBatch]) -> int:
    """Of sequences; padding is none."""
    return int(sum((b.segments > 0).sum() for b in batches))


def attended(batches: Sequence[LearnerBatch]) -> float:
    """Mean number of tokens that a token attends to, itself included."""
    return float(sum((b.positions + 1)[b.segments > 0].sum() for b in batches)) / tokens(batches)


def _random(lengths: Sequence[int], vocab_size: int, seed: int) -> list[packing.Sequence]:
    rng = np.random.default_rng(seed)
    result = []
    for length in lengths:
        mask = rng.random(length) < TRAINED
        mask[0] = False
        ids = rng.integers(0, vocab_size, length).astype(np.int32)
        result.append(packing.Sequence(ids=ids, loss_mask=mask, advantages=float(rng.standard_normal())))
    return result
