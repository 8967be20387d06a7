"""Arithmetic of a train step, and the peak rates of devices it is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from trace_jax.config import PolicyConfig
from trace_jax.config_rules_policy import ATTENTION, DELTA, mixers

# Dense bfloat16 matmul FLOP/s of one device, from the makers' data sheets (no sparsity). The first name that the
# device kind contains counts, so the longer of two comes first.
PEAKS = {
    "TPU v6": 918e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,  # v5e
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # how a v5p calls itself
    "TPU v4 lite": 138e12,
    "TPU v4": 275e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
}


def flops_per_token(policy: PolicyConfig, vocab_size: int, attended: float) -> float:
    """Model FLOPs of one token in training: forward, and twice that for the backward pass.

    Two per weight and token in every matmul (of experts those that the token has), plus scores and values over the
    tokens attended, or reading, changing and asking the state of a delta layer. Recomputation (remat, chunked logits),
    masked-out attention and padding are the implementation's own cost and are not counted.

    Args:
        attended: mean number of tokens a token attends to, itself included.
    """
    p, kinds = policy, mixers(policy)
    query, shared = p.heads * p.head_dim, p.kv_heads * p.head_dim
    attention = p.width * ((2 + p.attention_gate) * query + 2 * shared) + 2 * query * attended
    key, value = p.delta_key_heads * p.delta_key_dim, p.delta_value_heads * p.delta_value_dim
    delta = p.width * (2 * key + 3 * value + 2 * p.delta_value_heads) + p.conv_width * (2 * key + value)
    delta += 3 * p.delta_value_dim * p.delta_key_dim * p.delta_value_heads
    feed = 3 * p.width * (p.mlp_width + p.experts_per_token * p.expert_width + p.shared_expert_width)
    feed += p.width * p.experts
    layers = kinds.count(ATTENTION) * attention + kinds.count(DELTA) * delta + p.layers * feed
    return 3 * 2 * (layers + p.width * vocab_size)


def attended(lengths: Sequence[int] | Int[np.ndarray, " n"]) -> float:
    """Mean number of tokens that a token of sequences of these lengths attends to; 0 without sequences."""
    n = np.asarray(lengths, np.float64)
    return float((n * (n + 1) / 2).sum() / n.sum()) if n.sum() else 0.0


def peak(device: jax.Device | None = None) -> float | None:
    """Peak FLOP/s of a device (default: the first), None when its kind is not in the table, as CPUs are not."""
    kind = (device or jax.local_devices()[0]).device_kind.lower()
    return next((rate for name, rate in PEAKS.items() if name.lower() in kind), None)
