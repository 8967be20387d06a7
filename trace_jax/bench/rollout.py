"""Engine throughput: against other samplers, against itself without its parts, and as a share of what the machine can
do at that moment.

Headline figures, all measured in one run on one machine:

    vs_transformers  sampled tokens/s of 32 x (256 + 64) over those of `transformers` generate, by size of the policy
    vs_bare_loop     the same over a bare decoding loop in JAX that schedules nothing
    reuse_speedup    eight turns with the cache kept over the same with every turn fed anew
    tool_overlap     decode rate of a collection with tools of 50 ms over the same with instant ones
    occupancy        share of decoded slots and steps that drew a token for a row
    compiles         decoding and prefill programs of each engine, and the bound on them
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from trace_jax.bench import measure, rollout_compare, rollout_tools
from trace_jax.bench.learner import flops_per_token
from trace_jax.bench.rollout_compare import compiles, occupancy
from trace_jax.bench.rollout_drive import Others, Shape, drive, spent
from trace_jax.bench.rollout_peer import Peer, interpreter
from trace_jax.config import ConfigError, RunConfig
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.engine import Engine

PROMPT, OBSERVATION = 40, 24  # tokens of a prompt and of a tool result, at the configured shapes
TURN = 32  # sampled tokens of a turn there
BUSY = 0.1  # share of the cores in other hands from which a comparison is worth a warning
SLOTS_FOR_OVERLAP = 128  # with few slots all rows wait at the same time, which is not what the target is about
BARS = {
    "vs_transformers": {"nano": 10.0, "5m": 4.0},
    "vs_bare_loop": {"nano": 0.8, "5m": 0.8},
    "reuse_speedup": 2.0,
    "tool_overlap": 0.85,
}


def run(config: RunConfig, repeats: int, peers: str | Path | None = None) -> dict[str, Any]:
    """All of it. The comparisons have shapes of their own; `sizes`, `measured` and `share` are at those of `config`.

    Args:
        peers: a Python that has torch and transformers; by default this one, if it has.

    Raises:
        ConfigError: a context that holds no turn; an interpreter that cannot run the peer.
    """
    shape = _shape(config)
    python, note = interpreter(peers)
    say = _Progress(len(rollout_compare.SIZES) + 3)
    steps = config.rollout.decode_steps
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(Peer(python)) if python is not None else None
        sizes = {}
        for name in rollout_compare.SIZES:
            say(f"against {'other samplers' if peer else 'a bare loop'}, policy {name}")
            sizes[name] = rollout_compare.compare(name, repeats, peer, steps)
        versions = peer.versions if peer is not None else None
    others = Others()
    say("with the cache kept and fed anew")
    reused = rollout_compare.reuse(repeats, steps)
    say("slow tools against instant ones")
    tools = rollout_tools.overlap(config, repeats)
    say("the shapes of the configuration")
    sections, configured = _configured(config, shape, repeats)
    busy = others.share()
    headline = {
        "vs_transformers": {name: d["vs_transformers"]["median"] for name, d in sizes.items()} if python else None,
        "vs_bare_loop": {name: d["vs_bare_loop"]["median"] for name, d in sizes.items()},
        "reuse_speedup": reused["reuse_speedup"]["median"],
        "tool_overlap": tools["tool_overlap"]["median"],
        "occupancy": {name: d["occupancy"] for name, d in sizes.items()}
        | {"instant_tools": tools["occupancy"]["instant"], "slow_tools": tools["occupancy"]["slow"]}
        | {"config": configured["occupancy"]},
        "compiles": {name: d["compiles"] for name, d in sizes.items()}
        | {"reuse": reused["compiles"], "tools": tools["compiles"], "config": configured["compiles"]},
    }
    result = headline | sections
    result["details"] = {**sizes, "reuse": reused, "tools": tools, "config": configured, "peer_versions": versions}
    result["details"]["cores_taken_by_others"] = busy  # in all but the comparisons, which have their own
    most = max((share for share in (busy, *(d["cores_taken_by_others"] for d in sizes.values())) if share), default=0)
    if most > BUSY:
        result["warning"] = (
            f"other programs took up to {100 * most:.0f} % of the cores: programs that wait by spinning, like torch on "
            "all cores, then lose many times more than others; repeat on a quiet machine"
        )
    result["table"] = _table(headline, result["details"], config.rollout.slots)
    if note is not None:
        result["note"] = note
    return result


class _Progress:
    """A line on stderr for each part, since they take a minute each."""

    def __init__(self, parts: int):
        self._parts, self._said, self._begun = parts, 0, time.monotonic()

    def __call__(self, part: str) -> None:
        self._said += 1
        seconds = time.monotonic() - self._begun
        print(f"bench rollout {self._said}/{self._parts}, {seconds:.0f} s: {part}", file=sys.stderr, flush=True)


def _shape(config: RunConfig) -> Shape:
    limits = config.rollout
    turn = min(limits.max_turn_tokens, TURN)
    turns = min((limits.context - PROMPT) // (turn + OBSERVATION), limits.max_turns)
    if turns < 1:
        raise ConfigError(
            f"bench rollout: rollout.context {limits.context} holds no turn of {turn} tokens; "
            f"set it to at least {PROMPT + turn + OBSERVATION}"
        )
    return Shape(PROMPT, turn, turns, OBSERVATION)


def _configured(config: RunConfig, shape: Shape, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """All slots in groups that share a prompt, through turns that fill the configured context.

    Returns:
        The sections that every benchmark has, and what the engine counted.
    """
    limits, policy, vocabulary, group = config.rollout, config.policy, config.tokenizer.vocab_size, config.grpo.group
    model = Transformer(policy, vocabulary, rngs=nnx.Rngs(0))
    engine = Engine(model, limits, stop_id=vocabulary)
    distinct = math.ceil(limits.slots / group)
    drawn = np.random.default_rng(0).integers(0, vocabulary, (distinct, shape.prompt), np.int32)
    prompts = [drawn[row // group] for row in range(limits.slots)]
    runs = []
    for number in range(repeats + 1):
        runs.append(spent(engine, lambda: drive(engine, shape, prompts, number)))  # noqa: B023
        warm = engine.compiled if number == 0 else warm  # the first round compiles
    runs, stats = runs[1:], [counts for _, counts in runs[1:]]
    # Seconds of lanes that run side by side are taken as shares of the wall clock.
    lanes = [(s.decode_seconds + s.prefill_seconds) / seconds for seconds, s in runs]
    decode_rate = float(np.median([n * s.sampled_tokens / s.decode_seconds for n, s in zip(lanes, stats, strict=True)]))
    fed_rate = float(np.median([n * s.prefill_tokens / s.prefill_seconds for n, s in zip(lanes, stats, strict=True)]))
    taken = measure.spread([seconds for seconds, _ in runs])
    floor = measure.matmul_peak(policy.dtype, repeats) | {"bytes_per_second": measure.copy_rate(repeats)}
    attended = shape.prompt + (shape.length - shape.prompt) / 2
    each = flops_per_token(policy, vocabulary, attended) / 3  # forward only
    # One decoding step of a group reads every weight once and each row's keys and values.
    element = np.dtype(limits.cache_dtype).itemsize
    cached = 2 * policy.layers * policy.kv_heads * policy.head_dim * attended * element
    weights = sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    last = stats[-1]
    moved = cached + weights * last.decode_steps / last.sampled_tokens  # bytes a token
    sections = {
        "sizes": {
            "slots": limits.slots,
            "turns": shape.turns,
            "turn_tokens": shape.turn,
            "prompt_tokens": shape.prompt,
            "observation_tokens": shape.observation,
            "vocab_size": vocabulary,
            "group": group,
        },
        "floor": floor,
        "measured": {
            "seconds": taken,
            "decode_tokens_per_second": decode_rate,
            "prefill_tokens_per_second": fed_rate,
            "tokens_per_second": (last.sampled_tokens + last.prefill_tokens) / taken["median"],
            "shared_prefill_tokens": last.shared_tokens,
            "shared_prefill_tokens_expected": shape.shared(limits.slots, distinct),
        },
        "share": {
            "of_matmul_peak": decode_rate * each / 1e9 / floor["matmul_gflops"],
            "of_memory_bandwidth": decode_rate * moved / floor["bytes_per_second"],
        },
    }
    return sections, {
        "prefill_tokens": last.prefill_tokens,
        "prefill_tokens_expected": shape.fed(limits.slots, distinct),
        "occupancy": occupancy(stats),
        "compiles": compiles(engine, warm),
    }


def _table(headline: dict[str, Any], details: dict[str, Any], slots: int) -> list[dict[str, Any]]:
    """For people: one line a comparison, and the target of its ratio."""
    rows = []
    for name in ("vs_transformers", "vs_bare_loop"):
        for size, ratio in (headline[name] or {}).items():
            rates = details[size]["tokens_per_second"]
            side = "transformers" if name == "vs_transformers" else f"bare_loop_{details[size]['bare_loop_programs']}"
            rows.append(
                {"comparison": f"{name} {size}", "engine_tokens_per_s": rates["engine"], side: rates[side]}
                | {"ratio": ratio, "target": BARS[name].get(size)}
            )
            if name == "vs_transformers":
                rows[-1]["ratio with one thread"] = details[size]["vs_transformers_1_thread"]["median"]
    for name in ("reuse_speedup", "tool_overlap"):
        rows.append({"comparison": name, "ratio": headline[name], "target": BARS[name]})
    rows[-1]["slots"] = slots
    if slots < SLOTS_FOR_OVERLAP:
        del rows[-1]["target"]
    rows += [{"occupancy": name, "share": share} for name, share in headline["occupancy"].items()]
    rows += [{"compiled for": name, **counts} for name, counts in headline["compiles"].items()]
    return rows
