"""The probe of turn credit: all boundaries of a trajectory in one pass, against one pass of its own for each.

Headline figures, of trajectories of 12 tool turns of 150 tokens and answers of 40, all measured in one run:

    packed_speedup     time of the plain way over that of the packed one, for the same values
    token_bound        positions that the plain way needs over those of the packed one: what it could be if a position
                       cost the same anywhere; attention makes late positions dearer
    of_bound           the first over the second; above 1 where the plain way also loses time to its many small passes
    peak_bytes         memory of the program for one micro-batch, parameters included; the plain way has the same one
    step_share         share of a GRPO step that the probe takes; with --run-dir only, of that run's policy
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from trace_jax.bench import measure
from trace_jax.config import BatchConfig, RunConfig
from trace_jax.learner import sharding
from trace_jax.learner.probe import Probe, Question, transformer_scores
from trace_jax.policy.transformer import Transformer, logical_axes


@dataclass(frozen=True)
class Shape:
    """Tokens of the trajectories, and rows of a micro-batch.

    Attributes:
        plain_buckets: shorter rows for the plain way, whose sequences are short at first.
    """

    trajectories: int = 8
    turns: int = 12
    turn: int = 150
    prompt: int = 100
    scaffold: int = 1
    answer: int = 40
    row_length: int = 2560
    rows: int = 2
    plain_buckets: tuple[int, ...] = (640, 1280)


SHAPE = Shape()
MOST_DIFFERENT = 1e-4  # nats a token; beyond it the two do not compute the same


def run(config: RunConfig, repeats: int) -> dict[str, Any]:
    """Both ways in turn, with the configured policy and random weights.

    Raises:
        RuntimeError: the two disagree.
    """
    shape, vocab_size = SHAPE, config.tokenizer.vocab_size
    model = Transformer(config.policy, vocab_size, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    scores, mesh = transformer_scores(graphdef), sharding.make_mesh(config.mesh)
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = -(-shape.rows // ways) * ways
    batches = BatchConfig(shape.row_length, rows)
    axes = logical_axes(model)
    packed = Probe(scores, params, mesh, axes, batches)
    plain = Probe(scores, params, mesh, axes, BatchConfig(shape.row_length, rows, shape.plain_buckets))
    whole = _questions(shape, vocab_size)
    apart = [Question(q.ids, [b], q.scaffold, q.answer) for q in whole for b in q.boundaries]

    found, expected = np.concatenate(packed(whole)), np.concatenate(plain(apart))  # compiles, too
    different = float(np.abs(found - expected).max())
    if different > MOST_DIFFERENT:
        raise RuntimeError(f"bench probe: packed and plain values differ by {different:.2g} nats a token")
    taken: dict[str, list[float]] = {"packed": [], "plain": []}
    for _ in range(repeats):
        taken["packed"].append(measure.timed(lambda: packed(whole)))
        taken["plain"].append(measure.timed(lambda: plain(apart)))
    ratios = [b / a for a, b in zip(taken["packed"], taken["plain"], strict=True)]
    needed = {"packed": packed.positions(whole), "plain": plain.positions(apart)}
    speedup, bound = measure.spread(ratios), needed["plain"].needed / needed["packed"].needed
    seconds = {name: measure.spread(times) for name, times in taken.items()}
    return {
        "packed_speedup": speedup["median"],
        "token_bound": bound,
        "of_bound": speedup["median"] / bound,
        "peak_bytes": packed.peak_bytes(shape.row_length, rows),
        "step_share": None,
        "sizes": {
            "parameters": sum(p.size for p in jax.tree.leaves(params)),
            "trajectories": shape.trajectories,
            "turns": shape.turns,
            "tokens": len(whole[0].ids),
            "answer": shape.answer,
            "row_length": shape.row_length,
            "rows": rows,
        },
        "floor": {},
        "measured": {
            "seconds": seconds,
            "speedup": speedup,
            "difference": different,
            **{f"{name}_positions": n.needed for name, n in needed.items()},
            **{f"{name}_computed": n.computed for name, n in needed.items()},
            "packed_tokens_per_second": needed["packed"].needed / seconds["packed"]["median"],
        },
        "share": {"of_token_bound": speedup["median"] / bound},
        "note": "step_share is null: run again with --run-dir RUN, a run whose SFT is done",
    }


def _questions(shape: Shape, vocab_size: int) -> list[Question]:
    rng = np.random.default_rng(0)
    length = shape.prompt + shape.turns * shape.turn
    ends = [shape.prompt + k * shape.turn for k in range(shape.turns + 1)]
    scaffold = rng.integers(0, vocab_size, shape.scaffold).tolist()
    return [
        Question(
            rng.integers(0, vocab_size, length).astype(np.int32),
            ends,
            scaffold,
            rng.integers(0, vocab_size, shape.answer).tolist(),
        )
        for _ in range(shape.trajectories)
    ]
