"""Engine throughput: tokens a second of decoding and prefill over several turns with the cache kept, without tools."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from flax import nnx

from trace_jax.bench import measure
from trace_jax.bench.learner import flops_per_token
from trace_jax.config import ConfigError, RunConfig
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.sampling import Sampling

PROMPT, OBSERVATION = 40, 24  # tokens of a prompt and of a tool result


def run(config: RunConfig, repeats: int) -> dict[str, Any]:
    """Fill all slots and sample turns up to the context, with a stop token that is never drawn: every turn has its full
    length, so that the figure does not depend on what an untrained policy happens to say."""
    limits, policy, vocab_size = config.rollout, config.policy, config.tokenizer.vocab_size
    turn = min(limits.max_turn_tokens, 32)
    turns = min((limits.context - PROMPT) // (turn + OBSERVATION), limits.max_turns)
    if turns < 1:
        raise ConfigError(
            f"bench rollout: rollout.context {limits.context} holds no turn of {turn} tokens; "
            f"set it to at least {PROMPT + turn + OBSERVATION}"
        )
    model = Transformer(policy, vocab_size, rngs=nnx.Rngs(0))
    engine = Engine(model, limits, stop_id=vocab_size)
    rng = np.random.default_rng(0)
    rows = np.arange(limits.slots)
    groups = math.ceil(limits.slots / config.grpo.group)
    prompts = [rng.integers(0, vocab_size, PROMPT, dtype=np.int32) for _ in range(groups)]
    prompts = [prompts[row // config.grpo.group] for row in rows]
    parts: list[dict[str, float]] = []

    def work():
        engine.begin(prompts, rows.astype(np.uint64), Sampling(limits.temperature))
        for _ in range(turns):
            sampled = engine.sample_turn(rows, np.full(len(rows), turn))
            assert all(len(s.ids) == turn for s in sampled)
            engine.extend(rows, [rng.integers(0, vocab_size, OBSERVATION, dtype=np.int32) for _ in rows])
        parts.append(engine.seconds)

    taken = measure.spread(measure.seconds(work, repeats))
    timed = parts[1:]
    decode, prefill = (float(np.median([p[name] for p in timed])) for name in ("decode", "prefill"))
    decoded, fed = len(rows) * turns * turn, len(rows) * turns * OBSERVATION
    attended = PROMPT + turns * (turn + OBSERVATION) / 2
    each = flops_per_token(policy, vocab_size, attended) / 3  # forward only
    floor = measure.matmul_peak(policy.dtype, repeats) | {"bytes_per_second": measure.copy_rate(repeats)}
    # One decoding step of the batch reads every weight once and each row's keys and values.
    size = np.dtype(limits.cache_dtype).itemsize if limits.cache_dtype != "bfloat16" else 2
    cached = 2 * policy.layers * policy.kv_heads * policy.head_dim * attended * size
    weights = sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    moved = decoded * (cached + weights / len(rows))
    return {
        "sizes": {
            "slots": len(rows),
            "turns": turns,
            "turn_tokens": turn,
            "prompt_tokens": PROMPT,
            "observation_tokens": OBSERVATION,
            "vocab_size": vocab_size,
        },
        "floor": floor,
        "measured": {
            "seconds": taken,
            "decode_tokens_per_second": decoded / decode,
            "prefill_tokens_per_second": fed / prefill,
            "tokens_per_second": (decoded + fed) / taken["median"],
            "programs": engine.compiled,
        },
        "share": {
            "of_matmul_peak": decoded / decode * each / 1e9 / floor["matmul_gflops"],
            "of_memory_bandwidth": moved / decode / floor["bytes_per_second"],
        },
    }
