"""Packing token sequences into rows of a fixed length.

A micro-batch always has the same shape, so the gradient is compiled once. A sequence never crosses a row; several share
one, told apart by `segments`, each with its own positions from 0. Nothing that the learner computes depends on which
sequences share a row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trace_jax.config import ConfigError


@dataclass(frozen=True)
class Sequence:
    """One token sequence to learn from; arrays have one entry per token.

    Attributes:
        ids: token ids, exactly as sampled or observed.
        loss_mask: True on tokens to train on. The first token has nothing before it and cannot be one.
        advantages: per token; ignored outside the mask and by "sft".
        old_logprobs: of the behaviour policy; ignored outside the mask and by "sft".
        weight: of this sequence in every aggregation.
        kept: ids that the sampler could have drawn in the place of each token, itself included; unused entries are -1.
            A token without any, and every token when there is no `kept`, is scored over the whole vocabulary.
    """

    ids: Int[np.ndarray, " n"]
    loss_mask: Bool[np.ndarray, " n"]
    advantages: Float[np.ndarray, " n"] | float = 0.0
    old_logprobs: Float[np.ndarray, " n"] | float = 0.0
    weight: float = 1.0
    kept: Int[np.ndarray, "n k"] | None = None

    def __len__(self) -> int:
        return len(self.ids)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LearnerBatch:
    """One micro-batch; numpy arrays until the train step places them on the mesh.

    Attributes:
        ids: token ids; padding is 0 (`segments` tells what is padding, never the id).
        positions: of each token in its own sequence, from 0.
        segments: number of the sequence in its row, from 1; 0 is padding.
        loss_mask: tokens that are trained on.
        advantages, old_logprobs, weights: per token, see `Sequence`.
        behaviour_logprobs: as sampled. `old_logprobs` are the same until `Learner.with_old` puts the learner's there.
        reference_logprobs: of the policy that the KL penalty pulls to; 0 when there is none.
        kept: see `Sequence`; None when no sampler left anything out, which costs nothing.
    """

    ids: Int[Array, "rows time"]
    positions: Int[Array, "rows time"]
    segments: Int[Array, "rows time"]
    loss_mask: Bool[Array, "rows time"]
    advantages: Float[Array, "rows time"]
    old_logprobs: Float[Array, "rows time"]
    weights: Float[Array, "rows time"]
    behaviour_logprobs: Float[Array, "rows time"]
    reference_logprobs: Float[Array, "rows time"]
    kept: Int[Array, "rows time k"] | None = None


_DTYPES = {"ids": np.int32, "positions": np.int32, "segments": np.int32, "loss_mask": bool}


def empty_batch(row_length: int, rows: int, top_k: int = 0) -> LearnerBatch:
    """A micro-batch of padding only, with room for `top_k` kept ids a token."""
    shape = (rows, row_length)
    streams = {f.name: np.zeros(shape, _DTYPES.get(f.name, np.float32)) for f in fields(LearnerBatch)}
    return LearnerBatch(**streams | {"kept": np.full((*shape, top_k), -1, np.int32) if top_k else None})


def layout(lengths: Seq[int], row_length: int) -> list[tuple[int, int]]:
    """Row and offset of every sequence: best fit, longest first; equal lengths keep their order.

    Raises:
        ConfigError: a sequence is longer than a row.
    """
    longest = max(lengths, default=0)
    if longest > row_length:
        raise ConfigError(
            f"a sequence of {longest} tokens does not fit learner rows of {row_length}: "
            "raise microbatch.row_length or lower rollout.context"
        )
    places: list[tuple[int, int]] = [(0, 0)] * len(lengths)
    free: list[tuple[int, int]] = []  # (free tokens, row), sorted
    rows = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(free, (lengths[i], -1))
        if at == len(free):
            free.append((row_length, rows))  # larger than every other: still sorted unless a row is untouched
            rows += 1
            at = len(free) - 1
        room, row = free.pop(at)
        places[i] = (row, row_length - room)
        insort(free, (room - lengths[i], row))
    return places


def pack(sequences: Seq[Sequence], row_length: int, rows: int, top_k: int = 0) -> list[LearnerBatch]:
    """Packs sequences into micro-batches of `rows` x `row_length`; the last one is filled up with padding rows.

    Deterministic: a function of the sequences and their order.

    Args:
        top_k: of the sampler: how many kept ids a token may have (part of the shape of a micro-batch).

    Raises:
        ConfigError: a sequence is longer than a row.
        ValueError: a sequence is empty, its arrays disagree in length, its first token is trained on, it keeps more
            than `top_k` ids a token, or a trained token is not among those kept in its place.
    """
    for i, s in enumerate(sequences):
        _check(i, s, top_k)
    places = layout([len(s) for s in sequences], row_length)
    used = 1 + max((row for row, _ in places), default=0)  # no sequences: one micro-batch of padding
    whole = empty_batch(row_length, -(-used // rows) * rows, top_k)
    segments_in_row = np.zeros(len(whole.ids), np.int32)
    for i in sorted(range(len(sequences)), key=places.__getitem__):
        s, (row, start) = sequences[i], places[i]
        at = (row, slice(start, start + len(s)))
        segments_in_row[row] += 1
        whole.ids[at] = s.ids
        whole.positions[at] = np.arange(len(s))
        whole.segments[at] = segments_in_row[row]
        whole.loss_mask[at] = s.loss_mask
        whole.advantages[at] = s.advantages
        whole.old_logprobs[at] = whole.behaviour_logprobs[at] = s.old_logprobs
        whole.weights[at] = s.weight
        if s.kept is not None:
            whole.kept[at][:, : s.kept.shape[1]] = s.kept
    return [jax.tree.map(lambda a, b=b: a[b : b + rows], whole) for b in range(0, len(whole.ids), rows)]


def unpack(values: Seq[Float[np.ndarray, "rows time"]], lengths: Seq[int], row_length: int) -> list[np.ndarray]:
    """Per-token values of micro-batches (in the order of `pack`) as one array per sequence, in the order packed."""
    rows = np.concatenate([np.asarray(v) for v in values]) if values else np.zeros((0, row_length), np.float32)
    return [rows[row, start : start + n] for n, (row, start) in zip(lengths, layout(lengths, row_length), strict=True)]


def _check(index: int, s: Sequence, top_k: int) -> None:
    n = len(s.ids)
    if n == 0:
        raise ValueError(f"sequence {index} is empty")
    for name in ("loss_mask", "advantages", "old_logprobs", "kept"):
        value = np.asarray(getattr(s, name))
        if value.ndim and len(value) != n:
            raise ValueError(f"sequence {index}: {name} has {len(value)} entries for {n} tokens")
    if s.loss_mask[0]:
        raise ValueError(f"sequence {index}: its first token has nothing before it and cannot be trained on")
    if s.kept is None:
        return
    if s.kept.shape[1] > top_k:
        raise ValueError(f"sequence {index} keeps {s.kept.shape[1]} ids a token, top_k is {top_k}")
    trained = s.kept[s.loss_mask]
    if not np.all((trained == s.ids[s.loss_mask][:, None]).any(1) | (trained < 0).all(1)):
        raise ValueError(f"sequence {index}: a trained token is not among the ids kept in its place")
