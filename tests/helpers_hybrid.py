"""A tiny policy with everything real models have, and adapters on it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.config import LoraConfig, PolicyConfig
from trace_jax.policy import lora

HYBRID = PolicyConfig(
    layers=3,  # the pattern once, and its beginning
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp_width=0,
    max_length=256,
    mixers=("delta", "attention"),
    delta_key_heads=2,
    delta_value_heads=4,
    delta_key_dim=8,
    delta_value_dim=8,
    attention_gate=True,
    norm_offset=True,
    rotary_fraction=0.25,
    experts=6,
    experts_per_token=2,
    expert_width=24,
    shared_expert_width=16,
    tie_embeddings=False,
)
LORA = LoraConfig(
    rank=4, alpha=8.0, targets=("query", "output", "delta_value", "expert_gate", "expert_down", "shared_up")
)


def adapters(policy: PolicyConfig = HYBRID, config: LoraConfig = LORA, count: int = 1, seed: int = 1) -> lora.Pairs:
    """Adapters that change something: B is drawn, too."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: lora.init(policy, config, key, count), jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.0, 0.2, x.shape), jnp.float32), shapes)
