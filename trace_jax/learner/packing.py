"""Packing token sequences into rows of a fixed length, or of a few (buckets).

Micro-batches have one shape for each row length, so the gradient is compiled as often as there are lengths. A sequence
never crosses a row; several share one, told apart by `segments`, each with its own positions from 0. Nothing that the
learner computes depends on which sequences share a row or on its length.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from functools import cache

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trace_jax.config import BatchConfig, ConfigError


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
        experts: those of a mixture-of-experts policy that the sampler chose for each token in each of L layers, used
            again by the learner; negative ones, and all when there is no `experts`, are chosen anew.
        prompt: tokens of its prompt, whose last one locks the mixture of adapters that a gate gives it
            (`policy.mixture`); 0: there is no gate.
    """

    ids: Int[np.ndarray, " n"]
    loss_mask: Bool[np.ndarray, " n"]
    advantages: Float[np.ndarray, " n"] | float = 0.0
    old_logprobs: Float[np.ndarray, " n"] | float = 0.0
    weight: float = 1.0
    kept: Int[np.ndarray, "n k"] | None = None
    experts: Int[np.ndarray, "n L e"] | None = None
    prompt: int = 0

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
        experts: see `Sequence`; None when no sequence has any.
        lock: column in the row of the last token of the prompt, from that token on; -1 before it and in padding. None
            when no sequence says how long its prompt is.
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
    experts: Int[Array, "rows time L e"] | None = None
    lock: Int[Array, "rows time"] | None = None


SHORTEST = 16  # row length, tokens

_DTYPES = {"ids": np.int32, "positions": np.int32, "segments": np.int32, "loss_mask": bool}


def empty_batch(
    row_length: int, rows: int, top_k: int = 0, experts: tuple[int, ...] | None = None, lock: bool = False
) -> LearnerBatch:
    """A micro-batch of padding only, with room for `top_k` kept ids and the experts (layers, number) of a token, and
    with a `lock` if it is asked for."""
    shape = (rows, row_length)
    streams = {f.name: np.zeros(shape, _DTYPES.get(f.name, np.float32)) for f in fields(LearnerBatch)}
    streams["kept"] = np.full((*shape, top_k), -1, np.int32) if top_k else None
    streams["experts"] = None if experts is None else np.full((*shape, *experts), -1, np.int16)
    streams["lock"] = np.full(shape, -1, np.int32) if lock else None
    return LearnerBatch(**streams)


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


@dataclass(frozen=True)
class Plan:
    """Where sequences are to go.

    Attributes:
        shapes: rows and row length of each micro-batch.
        places: micro-batch, row and offset of each sequence.
    """

    shapes: list[tuple[int, int]]
    places: list[tuple[int, int, int]]


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
    return pack_buckets(sequences, BatchConfig(row_length, rows), top_k)


def unpack(values: Seq[Float[np.ndarray, "rows time"]], lengths: Seq[int], row_length: int) -> list[np.ndarray]:
    """Per-token values of micro-batches (in the order of `pack`) as one array per sequence, in the order packed."""
    rows = len(values[0]) if len(values) else 1
    return unpack_buckets(values, lengths, BatchConfig(row_length, rows))


def pack_buckets(
    sequences: Seq[Sequence], config: BatchConfig, top_k: int = 0, ways: int = 1, lock: bool = False
) -> list[LearnerBatch]:
    """Packs sequences into micro-batches of the shapes of `bucket_rows`, see `plan`; without buckets as `pack`.

    Args:
        top_k: as of `pack`.
        ways: devices that the rows of a micro-batch are split over.
        lock: give micro-batches a `lock` even if there is no sequence to say where.

    Raises:
        ConfigError, ValueError: as `pack` and `validate`.
    """
    for i, s in enumerate(sequences):
        _check(i, s, top_k)
    planned = plan([len(s) for s in sequences], config, ways)
    experts = next((s.experts.shape[1:] for s in sequences if s.experts is not None), None)
    lock = lock or any(s.prompt for s in sequences)
    batches = [empty_batch(length, rows, top_k, experts, lock) for rows, length in planned.shapes]
    segments = [np.zeros(rows, np.int32) for rows, _ in planned.shapes]  # sequences in each row so far
    for i in sorted(range(len(sequences)), key=planned.places.__getitem__):
        s, (number, row, start) = sequences[i], planned.places[i]
        at, batch = (row, slice(start, start + len(s))), batches[number]
        segments[number][row] += 1
        batch.ids[at] = s.ids
        batch.positions[at] = np.arange(len(s))
        batch.segments[at] = segments[number][row]
        batch.loss_mask[at] = s.loss_mask
        batch.advantages[at] = s.advantages
        batch.old_logprobs[at] = batch.behaviour_logprobs[at] = s.old_logprobs
        batch.weights[at] = s.weight
        if s.kept is not None:
            batch.kept[at][:, : s.kept.shape[1]] = s.kept
        if s.experts is not None:
            batch.experts[at] = s.experts
        if s.prompt:
            batch.lock[row, start + s.prompt - 1 : start + len(s)] = start + s.prompt - 1
    return batches


def unpack_buckets(
    values: Seq[Float[np.ndarray, "rows time"]], lengths: Seq[int], config: BatchConfig, ways: int = 1
) -> list[np.ndarray]:
    """Per-token values of the micro-batches of `pack_buckets` as one array per sequence, in the order packed."""
    places = plan(lengths, config, ways).places
    values = [np.asarray(v) for v in values]
    return [values[b][row, start : start + n] for n, (b, row, start) in zip(lengths, places, strict=True)]


def validate(config: BatchConfig, section: str = "microbatch", ways: int = 1) -> None:
    """Refuses shapes that cannot be, or that no sequence would need.

    Args:
        section: name of the section for messages, e.g. "grpo.microbatch".
        ways: devices that the rows of a micro-batch are split over.

    Raises:
        ConfigError: naming the field and what to set it to.
    """
    if config.rows % ways:
        raise ConfigError(
            f"`{section}.rows` {config.rows} does not split over mesh data x fsdp = {ways} devices: "
            f"use a multiple of {ways}"
        )
    buckets = list(config.buckets)
    shown = f"`{section}.buckets` {buckets}"
    if buckets != sorted(set(buckets)):
        raise ConfigError(f"{shown} must ascend and name no length twice: {sorted(set(buckets))}")
    if buckets and buckets[0] < SHORTEST:
        raise ConfigError(f"{shown} has rows of {buckets[0]} tokens: leave out those below {SHORTEST}")
    if buckets and buckets[-1] >= config.row_length:
        raise ConfigError(
            f"{shown} must be shorter than `{section}.row_length` ({config.row_length}), the longest there is: "
            f"leave out {', '.join(str(b) for b in buckets if b >= config.row_length)}"
        )


def bucket_rows(config: BatchConfig, ways: int = 1) -> dict[int, int]:
    """Rows of a micro-batch for every row length, longest first: as many as `row_length` x `rows` tokens have room for,
    in multiples of `ways`.

    Raises:
        ConfigError: see `validate`.
    """
    validate(config, ways=ways)
    budget = config.row_length * config.rows
    return {n: budget // n // ways * ways for n in (config.row_length, *reversed(config.buckets))}


def plan(lengths: Seq[int], config: BatchConfig, ways: int = 1) -> Plan:
    """Micro-batches for sequences of these lengths, with few computed positions and never more than without buckets.

    Rows are filled in several ways (best fit into the longest rows; the fullest row that greedy filling finds among all
    lengths, or among all but the shortest ones). For each, rows are distributed over micro-batches of the shortest
    length that they fit, except where they cost nothing in a longer one that has room. The cheapest is taken; of
    equals, that with the shortest rows.

    Returns:
        A deterministic function of the arguments; long rows come first. Without sequences: one micro-batch.

    Raises:
        ConfigError: a sequence is longer than `row_length`, or see `validate`.
    """
    rows_of = bucket_rows(config, ways)
    places = layout(lengths, config.row_length)
    if not lengths:
        return Plan([(config.rows, config.row_length)], [])
    best_fit: list[list[int]] = [[] for _ in range(1 + max(row for row, _ in places))]
    for i in sorted(range(len(lengths)), key=places.__getitem__):
        best_fit[places[i][0]].append(i)
    if len(rows_of) == 1:
        return _placed(best_fit, lengths, rows_of, [-(-len(best_fit) // config.rows)])
    ascending = sorted(rows_of)
    candidates = [best_fit, *(_fullest_rows(lengths, ascending[i:]) for i in range(len(ascending)))]
    candidates = [sorted(rows, key=lambda row: -sum(lengths[i] for i in row)) for rows in candidates]
    results = [(*_distribute([sum(lengths[i] for i in row) for row in rows], rows_of), rows) for rows in candidates]
    _, counts, rows = min(results, key=lambda r: r[0])
    return _placed(rows, lengths, rows_of, counts)


def _fullest_rows(lengths: Seq[int], row_lengths: Seq[int]) -> list[list[int]]:
    """Sequences of each row: the longest that is left, then always the longest that still fits, in the row length
    (ascending) that leaves the smallest share of itself empty."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], -i))
    sizes = [lengths[i] for i in order]
    rows = []
    while sizes:
        best: tuple[float, list[int]] = (2.0, [])
        for length in row_lengths[bisect_left(row_lengths, sizes[-1]) :]:
            at, room, taken = len(sizes) - 1, length, []
            while at >= 0:
                room -= sizes[at]
                taken.append(at)
                at = bisect_left(sizes, room + 1, 0, at) - 1
            best = min(best, (room / length, taken), key=lambda b: b[0])
        rows.append([order[at] for at in best[1]])
        for at in best[1]:  # descending, so that the rest keep their place
            del sizes[at], order[at]
    return rows


def _distribute(used: Seq[int], rows_of: dict[int, int]) -> tuple[tuple[int, int], list[int]]:
    """How many micro-batches of each row length hold rows of which `used` tokens (descending) are taken.

    The first rows go to the longest micro-batches. Of these there are as many as are needed for rows that are too long
    for the next ones, or one more, which may take up what would leave others nearly empty.

    Returns:
        Computed positions and, for ties, pairs of positions in one row; numbers in the order of `rows_of`.
    """
    shapes = list(rows_of.items())
    # rows that have to be in micro-batches up to this length's
    due = [sum(u > length for u in used) for length, _ in shapes[1:]] + [len(used)]

    @cache
    def cheapest(kind: int, done: int) -> tuple[tuple[int, int], tuple[int, ...]]:
        if kind == len(shapes):
            return (0, 0), ()
        length, rows = shapes[kind]
        least = max(-(-(due[kind] - done) // rows), 0)
        options = []
        for count in (least, least + 1) if done < len(used) else (0,):
            (positions, pairs), rest = cheapest(kind + 1, min(done + count * rows, len(used)))
            here = count * rows * length
            options.append(((positions + here, pairs + here * length), (count, *rest)))
        return min(options)

    cost, counts = cheapest(0, 0)
    return cost, list(counts)


def _placed(rows: Seq[Seq[int]], lengths: Seq[int], rows_of: dict[int, int], counts: Seq[int]) -> Plan:
    """Rows, in order, in `counts` micro-batches of each row length."""
    shapes = [(n, length) for (length, n), count in zip(rows_of.items(), counts, strict=True) for _ in range(count)]
    spots = [(number, row) for number, (n, _) in enumerate(shapes) for row in range(n)]
    places: list[tuple[int, int, int]] = [(0, 0, 0)] * len(lengths)
    for spot, row in zip(spots, rows, strict=False):  # spots without a row are padding
        start = 0
        for i in row:
            places[i] = (*spot, start)
            start += lengths[i]
    return Plan(shapes, places)


def _check(index: int, s: Sequence, top_k: int) -> None:
    n = len(s.ids)
    if n == 0:
        raise ValueError(f"sequence {index} is empty")
    for name in ("loss_mask", "advantages", "old_logprobs", "kept", "experts"):
        value = np.asarray(getattr(s, name))
        if value.ndim and len(value) != n:
            raise ValueError(f"sequence {index}: {name} has {len(value)} entries for {n} tokens")
    if not 0 <= s.prompt <= n:
        raise ValueError(f"sequence {index}: a prompt of {s.prompt} tokens among {n}")
    if s.loss_mask[0]:
        raise ValueError(f"sequence {index}: its first token has nothing before it and cannot be trained on")
    if s.kept is None:
        return
    if s.kept.shape[1] > top_k:
        raise ValueError(f"sequence {index} keeps {s.kept.shape[1]} ids a token, top_k is {top_k}")
    trained = s.kept[s.loss_mask]
    if not np.all((trained == s.ids[s.loss_mask][:, None]).any(1) | (trained < 0).all(1)):
        raise ValueError(f"sequence {index}: a trained token is not among the ids kept in its place")
