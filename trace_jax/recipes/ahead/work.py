"""Arithmetic of a program on one chip, counted from the configuration: what the compiler cannot see.

The compiler counts the body of a loop once and a Pallas kernel not at all. Model FLOPs are those of `learner.flops`;
executed ones add what is computed again in the backward pass and what several chips compute alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_jax.config import PolicyConfig
from trace_jax.config_rules_policy import ATTENTION, DELTA, mixers
from trace_jax.learner.flops import flops_per_token
from trace_jax.policy.delta_rule import CHUNK

# Passes over the matmuls of a layer: forward, twice that backward, and forward again where remat keeps nothing.
PASSES = {"none": 3, "dots": 3, "full": 4}
# Matmuls of the attention kernel, of which forward has two: the two backward kernels of splash attention take four and
# three, since each computes scores and their gradients for itself.
KERNEL_FORWARD, KERNEL_BACKWARD = 2, 7
EXACT = 6  # matmuls in bfloat16 that make one of float32 at the highest precision


@dataclass(frozen=True)
class Work:
    """FLOPs of one micro-batch.

    Attributes:
        model: of the model, all chips together: no recomputation, no masked scores, no padding.
        executed: on the busiest chip, experts used evenly.
    """

    model: float
    executed: float


def attended(length: int) -> float:
    """Mean number of tokens that a token of a full context attends to, itself included."""
    return (length + 1) / 2


def training(policy: PolicyConfig, vocab_size: int, tokens: int, context: int, mesh: dict[str, int]) -> Work:
    """Of a training micro-batch with trajectories that fill `context`.

    Args:
        tokens: positions of the micro-batch, all chips together.
        mesh: sizes by axis. Rows are split over data and fsdp, matmuls over tensor, experts over expert; chips of one
            expert group compute the rest of their tokens alike.
    """
    seen = attended(context)
    parts = _forward(policy, vocab_size, seen)
    local = tokens / (mesh["data"] * mesh["fsdp"])
    tensor, expert = mesh["tensor"], mesh["expert"]
    layer = PASSES[policy.remat]
    kernel = (KERNEL_FORWARD + KERNEL_BACKWARD + (KERNEL_FORWARD if policy.remat == "full" else 0)) / KERNEL_FORWARD
    executed = (
        layer * (parts["projections"] / tensor + parts["router"] + parts["experts"] / (tensor * expert))
        + layer * _exact(policy) / tensor
        + kernel * parts["scores"] / tensor
        + 4 * parts["vocabulary"] / tensor  # scores of all but the first chunks are computed again
    )
    return Work(model=tokens * flops_per_token(policy, vocab_size, seen), executed=local * executed)


def scoring(policy: PolicyConfig, vocab_size: int, tokens: int, context: int, mesh: dict[str, int]) -> Work:
    """Of a forward pass alone."""
    parts = _forward(policy, vocab_size, attended(context))
    local = tokens / (mesh["data"] * mesh["fsdp"])
    split = parts["projections"] + parts["scores"] + parts["vocabulary"] + parts["experts"] / mesh["expert"]
    split += _exact(policy)
    return Work(model=tokens * sum(parts.values()), executed=local * (split / mesh["tensor"] + parts["router"]))


def _exact(policy: PolicyConfig) -> float:
    """FLOPs of one token in the delta rule, forward, as the chunked form computes them: float32 matmuls of the highest
    precision, each of which is six in bfloat16 on a matrix unit (`jax.lax.Precision.HIGHEST`)."""
    p, layers = policy, mixers(policy).count(DELTA)
    depth, width = p.delta_key_dim, p.delta_value_dim
    return EXACT * layers * p.delta_value_heads * (6 * depth * width + 4 * CHUNK * width)


def _forward(policy: PolicyConfig, vocab_size: int, seen: float) -> dict[str, float]:
    """FLOPs of one token in a forward pass, by how they are split."""
    p, kinds = policy, mixers(policy)
    attention, delta = kinds.count(ATTENTION), kinds.count(DELTA)
    query, shared = p.heads * p.head_dim, p.kv_heads * p.head_dim
    key, value = p.delta_key_heads * p.delta_key_dim, p.delta_value_heads * p.delta_value_dim
    projections = attention * p.width * ((2 + p.attention_gate) * query + 2 * shared)
    projections += delta * p.width * (2 * key + 3 * value + 2 * p.delta_value_heads)
    projections += delta * p.conv_width * (2 * key + value)
    state = 3 * p.delta_value_dim * p.delta_key_dim * p.delta_value_heads  # read, changed, asked
    projections += p.layers * 3 * p.width * (p.mlp_width + p.shared_expert_width)
    return {
        "projections": 2 * projections,
        "states": 2 * delta * state,
        "router": 2 * p.layers * p.width * p.experts,
        "experts": 2 * p.layers * 3 * p.width * p.experts_per_token * p.expert_width,
        "scores": 2 * attention * 2 * query * seen,
        "vocabulary": 2 * p.width * vocab_size,
    }
