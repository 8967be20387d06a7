"""The engine against other samplers at fixed shapes, and against itself without its cache.

Every round takes all sides in turn, so that a change of the machine's load meets all alike; ratios are medians over
rounds of ratios within a round. Everything is warm: the first round is not counted.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trace_jax.bench import measure
from trace_jax.bench.rollout_drive import Others, Shape, drive, row_seed, spent
from trace_jax.bench.rollout_loop import BareLoop
from trace_jax.bench.rollout_peer import Peer
from trace_jax.config import PolicyConfig, RolloutConfig
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.engine import Engine

SIZES: dict[str, tuple[PolicyConfig, int]] = {  # policy, vocabulary
    "nano": (PolicyConfig(layers=4, width=128, heads=4, kv_heads=2, head_dim=32, mlp_width=384), 768),
    "5m": (PolicyConfig(layers=6, width=256, heads=8, kv_heads=4, head_dim=32, mlp_width=768), 1024),
}
ROWS, SHAPE = 32, Shape(prompt=256, turn=64)
REUSE_ROWS, REUSE_SHAPE = 64, Shape(prompt=40, turn=32, turns=8, observation=24)
SETTLE_SECONDS = 0.1  # idle threads of the side before may spin for a moment


def compare(name: str, repeats: int, peer: Peer | None, decode_steps: int) -> dict[str, Any]:
    """Sampled tokens a second of the engine, of the peer with the same weights and of the bare loop.

    Returns:
      Of one of `SIZES`: parameters, seconds and tokens a second of every side, ratios, and what the engine counted.
    """
    policy, vocabulary = SIZES[name]
    model = Transformer(policy, vocabulary, rngs=nnx.Rngs(0))
    parameters = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    result: dict[str, Any] = {"parameters": parameters, "rows": ROWS, "prompt": SHAPE.prompt, "sampled": SHAPE.turn}
    engine = Engine(model, _config(ROWS, SHAPE, decode_steps), stop_id=vocabulary)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    halves = (1, 2) if jax.default_backend() == "cpu" and cores > 1 else (1,)
    loops = {f"bare_loop_{n}": BareLoop(model, ROWS, SHAPE.prompt, SHAPE.turn, n) for n in halves}
    if peer is not None:
        counted = peer.load(name, model)
        if counted != parameters:
            raise RuntimeError(f"the peer's model has {counted} parameters, ours {parameters}")
        result["logits_difference"] = _logits_difference(name, model, peer)
    # One thread is what is left of it on a busy machine, where threads that wait for each other by spinning lose most.
    asked = {} if peer is None else {"transformers": cores, "transformers_1_thread": 1}
    stats = []

    def one_round(number: int) -> dict[str, float]:
        prompts = np.random.default_rng(number).integers(0, vocabulary, (ROWS, SHAPE.prompt), np.int32)
        time.sleep(SETTLE_SECONDS)
        seconds, counts = spent(engine, lambda: drive(engine, SHAPE, prompts, number))
        stats.append(counts)
        times = {"engine": seconds}
        for side, threads in asked.items():
            time.sleep(SETTLE_SECONDS)
            request = {"name": name, "prompts": prompts.tolist(), "tokens": SHAPE.turn, "seed": number}
            answer = peer.ask("generate", **request, threads=threads)
            if answer["tokens"] != ROWS * SHAPE.turn:
                raise RuntimeError(f"the peer sampled {answer['tokens']} tokens instead of {ROWS * SHAPE.turn}")
            times[side] = answer["seconds"]
        seeds = np.array([divmod(row_seed(number, row), 1 << 32) for row in range(ROWS)], np.uint32)
        for side, loop in loops.items():
            time.sleep(SETTLE_SECONDS)
            times[side] = measure.timed(lambda: loop(prompts, seeds))  # noqa: B023
        return times

    one_round(0)
    compiled = engine.compiled
    others = Others(None if peer is None else peer.pid)
    rounds = [one_round(1 + i) for i in range(repeats)]
    busy = others.share()
    for loop in loops.values():
        loop.close()
    best = min(loops, key=lambda side: statistics.median(r[side] for r in rounds))
    return (
        result
        | {
            "bare_loop_programs": int(best.rpartition("_")[2]),  # that run side by side: the faster way
            "seconds": {side: measure.spread([r[side] for r in rounds]) for side in rounds[0]},
            "tokens_per_second": {
                side: ROWS * SHAPE.turn / statistics.median(r[side] for r in rounds) for side in rounds[0]
            },
            "vs_transformers": _ratios(rounds, "transformers") if peer is not None else None,
            "vs_transformers_1_thread": _ratios(rounds, "transformers_1_thread") if peer is not None else None,
            "vs_bare_loop": _ratios(rounds, best),
            "cores_taken_by_others": busy,
            "occupancy": occupancy(stats[1:]),
            "prefill_tokens": stats[-1].prefill_tokens,
            "prefill_tokens_expected": SHAPE.fed(ROWS, ROWS),
            "compiles": compiles(engine, compiled),
        }
    )


def reuse(repeats: int, decode_steps: int) -> dict[str, Any]:
    """Several turns with observations, with the cache kept across turns and without, at nano size."""
    policy, vocabulary = SIZES["nano"]
    model = Transformer(policy, vocabulary, rngs=nnx.Rngs(0))
    settings = _config(REUSE_ROWS, REUSE_SHAPE, decode_steps)
    engines = {side: Engine(model, settings, stop_id=vocabulary, reuse=side == "kept") for side in ("kept", "fed_anew")}
    prompts = np.random.default_rng(0).integers(0, vocabulary, (REUSE_ROWS, REUSE_SHAPE.prompt), np.int32)
    fed: dict[str, int] = {}

    def one_round(number: int) -> dict[str, float]:
        times = {}
        for side, engine in engines.items():
            times[side], counts = spent(engine, lambda: drive(engine, REUSE_SHAPE, prompts, number))  # noqa: B023
            fed[side] = counts.prefill_tokens
        return times

    one_round(0)
    compiled = engines["kept"].compiled
    rounds = [one_round(1 + i) for i in range(repeats)]
    return {
        "rows": REUSE_ROWS,
        "turns": REUSE_SHAPE.turns,
        "turn": REUSE_SHAPE.turn,
        "observation": REUSE_SHAPE.observation,
        "prompt": REUSE_SHAPE.prompt,
        "seconds": {side: measure.spread([r[side] for r in rounds]) for side in engines},
        "prefill_tokens": fed,
        "prefill_tokens_expected": REUSE_SHAPE.fed(REUSE_ROWS, REUSE_ROWS),  # with the cache kept
        "reuse_speedup": ratios([r["fed_anew"] / r["kept"] for r in rounds]),
        "compiles": compiles(engines["kept"], compiled),
    }


def ratios(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes of the ratios of some rounds."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def occupancy(stats: Sequence[Any]) -> float:
    """Share of decoded slots and steps that drew a token for a row, over several runs."""
    return sum(s.sampled_tokens for s in stats) / sum(s.slot_steps for s in stats)


def compiles(engine: Engine, warm: int) -> dict[str, int]:
    """Programs that an engine compiled, how many of them after the first round, and the most there can be."""
    return {"programs": engine.compiled, "while_timed": engine.compiled - warm, "bound": engine.compile_bound}


def _config(rows: int, shape: Shape, decode_steps: int) -> RolloutConfig:
    return RolloutConfig(slots=rows, context=shape.length, max_turn_tokens=shape.turn, decode_steps=decode_steps)


def _ratios(rounds: Sequence[dict[str, float]], side: str) -> dict[str, float]:
    return ratios([r[side] / r["engine"] for r in rounds])


def _logits_difference(name: str, model: Transformer, peer: Peer) -> float:
    """Largest difference between the peer's scores and ours after one prompt: both sides compute the same model."""
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (1, SHAPE.prompt), np.int32)
    positions = jnp.arange(SHAPE.prompt)[None]
    ours = model.logits(model(jnp.asarray(ids), positions, jnp.ones_like(positions))[:, -1])
    theirs = np.asarray(peer.ask("logits", name=name, prompts=ids.tolist())["logits"])
    return float(np.abs(np.asarray(ours) - theirs).max())
