"""Learner throughput: real tokens a second of whole optimizer steps, against torch doing the same updates, against
padding, and as a share of the measured matmul peak.

Headline figures, all measured in one run on one machine, of the nano policy (`table` has those of a slice of
Qwen3-0.6B, too):

    tokens_per_s       of 32 rows of 512 tokens without padding, by size in `table`
    vs_torch           that rate over the rate of torch and transformers with the same weights and batch
    matmul_share       model FLOPs a second over the fastest matmul in the same round
    packing_gain       rate with sequences of real lengths packed into rows over the rate with one padded to each row
    peak_memory_ratio  memory of a gradient of 8k tokens with log-probs in chunks, over that with all scores at once
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from trace_jax.bench import learner_compare, learner_memory, learner_peer, measure
from trace_jax.bench.rollout_peer import Peer
from trace_jax.config import RunConfig
from trace_jax.learner import objectives, packing, sharding
from trace_jax.learner.flops import flops_per_token
from trace_jax.learner.step import Learner, transformer_logprobs
from trace_jax.policy.transformer import Transformer, logical_axes

MICROBATCHES = 2  # in one optimizer step: accumulation is part of what is measured
BUSY = 0.1  # share of the cores in other hands from which a comparison is worth a warning
LEAST_VS_TORCH = 1.5  # what we want of it on two CPU cores; the aim is 3


def run(config: RunConfig, repeats: int, peers: str | Path | None = None) -> dict[str, Any]:
    """All of it. The comparisons have shapes of their own; `sizes`, `measured` and `share` are at those of `config`.

    Args:
        peers: a Python that has torch and transformers; by default this one, if it has.

    Raises:
        ConfigError: an interpreter that cannot run the peer.
    """
    python, note = learner_peer.interpreter(peers)
    begun = time.monotonic()

    def say(part: str) -> None:
        print(f"bench learner, {time.monotonic() - begun:.0f} s: {part}", file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(Peer(python, learner_peer.SCRIPT)) if python is not None else None
        sizes = {}
        for name, size in learner_compare.SIZES.items():
            sizes[name] = learner_compare.compare(name, repeats, peer, lambda part: say(f"{name}: {part}"))  # noqa: B023
            say(f"{name}: memory of log-probs")
            sizes[name]["peak_bytes"] = learner_memory.peak_bytes(size.policy, size.vocab_size)
        versions = peer.versions if peer is not None else None
    say("the shapes of the configuration")
    table = [_row(name, details) for name, details in sizes.items()]
    result = {key: table[0][key] for key in table[0] if key not in ("size", "target")}  # of nano
    result |= _configured(config, repeats)
    result["details"] = {**sizes, "peer_versions": versions}
    busy = max((d["cores_taken_by_others"] or 0.0 for d in sizes.values()), default=0.0)
    if busy > BUSY:
        result["warning"] = (
            f"other programs took up to {100 * busy:.0f} % of the cores: programs that wait by spinning, like torch on "
            "all cores, then lose many times more than others; repeat on a quiet machine"
        )
    result["table"] = table
    if note is not None:
        result["note"] = note
    return result


def _row(size: str, details: dict[str, Any]) -> dict[str, Any]:
    """The headline figures of one size."""
    memory = details["peak_bytes"]

    def median(key: str) -> float | None:
        return None if details[key] is None else details[key]["median"]

    return {
        "size": size,
        "tokens_per_s": details["tokens_per_second"]["full"],
        "vs_torch": median("vs_torch"),
        "target": LEAST_VS_TORCH,
        "vs_torch_selective": median("vs_torch_selective"),
        "vs_torch_padded": median("vs_torch_padded"),
        "vs_torch_packed": median("vs_torch_packed"),
        "matmul_share": median("matmul_share"),
        "packing_gain": median("packing_gain"),
        "bucket_gain": median("bucket_gain"),
        "peak_memory_ratio": memory["chunked"] / memory["full"],
    }


def _sequences(row_length: int, rows: int, vocab_size: int) -> list[packing.Sequence]:
    """Random sequences a tenth to a half of a row long, as many as fit `rows` rows."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while True:
        lengths.append(int(rng.integers(max(row_length // 10, 2), row_length // 2 + 1)))
        if max(row for row, _ in packing.layout(lengths, row_length)) >= rows:
            break
    result = []
    for length in lengths[:-1]:
        mask = rng.random(length) < 0.4
        mask[0] = False
        result.append(
            packing.Sequence(
                ids=rng.integers(0, vocab_size, length).astype(np.int32),
                loss_mask=mask,
                advantages=np.full(length, rng.standard_normal(), np.float32),
                old_logprobs=np.full(length, -np.log(vocab_size), np.float32),
            )
        )
    return result


def _configured(config: RunConfig, repeats: int) -> dict[str, Any]:
    """GRPO optimizer steps at the configured shapes, on random tokens (speed does not depend on their values)."""
    policy, shape, vocab_size = config.policy, config.grpo.microbatch, config.tokenizer.vocab_size
    mesh = sharding.make_mesh(config.mesh)
    model = Transformer(policy, vocab_size, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    learner = Learner(
        transformer_logprobs(graphdef, config.rollout.temperature),
        objectives.grpo_objective(config.grpo),
        config.grpo.optimizer,
        total_steps=1000,
        mesh=mesh,
        axes=logical_axes(model),
    )
    sequences = _sequences(shape.row_length, shape.rows * MICROBATCHES, vocab_size)
    batches = packing.pack(sequences, shape.row_length, shape.rows)
    lengths = np.array([len(s) for s in sequences])
    tokens = int(lengths.sum())
    attended = float((lengths * (lengths + 1) / 2).sum() / tokens)
    state = learner.init(params)

    start = time.perf_counter()
    state, _ = learner.step(state, batches)
    compile_seconds = time.perf_counter() - start

    def work():
        nonlocal state
        state, _ = learner.step(state, batches)
        return jax.tree.leaves(state.params)

    taken = measure.spread(measure.seconds(work, repeats))
    floor = measure.matmul_peak(policy.dtype, repeats)
    each = flops_per_token(policy, vocab_size, attended)
    rate = tokens / taken["median"]
    positions = len(batches) * shape.rows * shape.row_length
    return {
        "sizes": {
            "parameters": sum(p.size for p in jax.tree.leaves(state.params)),
            "vocab_size": vocab_size,
            "rows": shape.rows,
            "row_length": shape.row_length,
            "microbatches": len(batches),
            "sequences": len(sequences),
            "mean_length": float(lengths.mean()),
            "padding": 1 - tokens / positions,
        },
        "floor": floor,  # of one device
        "measured": {
            "seconds": taken,
            "first_step_seconds": compile_seconds,
            "tokens_per_second": rate,
            "flops_per_token": each,
            "gflops": rate * each / 1e9,
            "programs": learner.compilations(),
        },
        "share": {"of_matmul_peak": rate * each / 1e9 / (floor["matmul_gflops"] * mesh.size)},
    }
