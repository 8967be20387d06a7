"""What a GRPO run needs of a device's memory, counted from its configuration before anything is allocated.

Parameters, moments, gradients and the key/value cache are exact. Activations and scores are an estimate: what the
backward pass of `policy.transformer` keeps, without the compiler's fusions and copies. Axis letters: D width, N and K
query and key/value heads, h head width, F width of the MLP, V vocabulary, T row length.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from trace_jax.config import RunConfig
from trace_jax.config_rules_policy import ATTENTION, DELTA, mixers
from trace_jax.learner import packing, sharding
from trace_jax.policy import lora, mixture
from trace_jax.policy.cache import default_block
from trace_jax.policy.transformer import Transformer, logical_axes
from trace_jax.recipes.turn_probe import is_anchor

FLOAT = 4  # bytes of a parameter, of a moment and of a score
SCORE_CHUNK = 1024  # tokens of a device whose scores over the vocabulary exist at once (`policy.logprobs`)
SCORE_COPIES = 4  # of them: scores, log-probabilities, probabilities, their gradient


@dataclass(frozen=True)
class Sizes:
    """Shapes of the policy without its numbers.

    Attributes:
        params: tree of `jax.ShapeDtypeStruct`. axes: their logical axis names.
    """

    params: Any
    axes: Any

    @classmethod
    def of(cls, config: RunConfig, vocab_size: int) -> Sizes:
        """Shapes of the configured policy."""
        model = nnx.eval_shape(lambda: Transformer(config.policy, vocab_size, rngs=nnx.Rngs(0)))
        return cls(nnx.state(model, nnx.Param), logical_axes(model))

    @classmethod
    def trained(cls, config: RunConfig, vocab_size: int) -> Sizes:
        """Shapes of what is trained: adapters, a gate over them, or all of it."""
        if not config.lora.rank:
            return cls.of(config, vocab_size)
        if config.lora.gate:
            return cls(jax.eval_shape(lambda: mixture.init(config.policy, len(config.lora.gate))), mixture.axes())
        like = jax.eval_shape(lambda key: lora.init(config.policy, config.lora, key), jax.random.key(0))
        return cls(like, lora.axes(config.policy, config.lora))

    @classmethod
    def mixed(cls, config: RunConfig) -> Sizes:
        """Shapes of the adapters that a gate mixes."""
        count = len(config.lora.gate)
        like = jax.eval_shape(lambda key: lora.init(config.policy, config.lora, key, count), jax.random.key(0))
        return cls(like, lora.axes(config.policy, config.lora))

    @property
    def count(self) -> int:
        """Parameters in all."""
        return sum(prod(p.shape) for p in jax.tree.leaves(self.params))

    def bytes_on(self, mesh: Mesh, gathered: bool = False) -> int:
        """Bytes of one copy of the parameters on each device. `gathered`: as a sampling lane holds them, whole over
        data and fsdp."""
        rules = dict(sharding.RULES)
        if gathered:
            rules = {axis: None if to in ("data", "fsdp") else to for axis, to in rules.items()}

        def held(p, names):
            spec = sharding.spec(names, p.shape, mesh, rules)
            return p.dtype.itemsize * prod(jax.sharding.NamedSharding(mesh, spec).shard_shape(p.shape))

        return sum(jax.tree.leaves(jax.tree.map(held, self.params, self.axes)))


def estimate(config: RunConfig, vocab_size: int, learner: Mesh, sampler: Mesh) -> dict[str, int]:
    """Bytes on each device by purpose.

    Args:
        learner, sampler: meshes of the two roles, the same one when they share their devices.

    Returns:
        Learner: `parameters`, `moments` (Adam's two), `gradients` (accumulated, and those of a micro-batch),
        `activations` of a micro-batch, `scores` over the vocabulary, `batch`, `reference` (the policy that the KL
        penalty pulls to), `versions` (earlier parameters that are still sampled with). Sampler: `sampler_parameters` (0
        when it reads the learner's), `probe_reference` (of turn credit), `kv_cache` with every slot full, `sampling`
        (scores of a decoding step). `learner` and `sampler` are their sums, `total` what the fullest device needs.
    """
    sizes, trained = Sizes.of(config, vocab_size), Sizes.trained(config, vocab_size)
    held = trained.bytes_on(learner)
    mixed = Sizes.mixed(config).bytes_on(learner) if config.lora.gate else 0
    learning = {
        "parameters": sizes.bytes_on(learner) + (held if config.lora.rank else 0) + mixed,
        "moments": 2 * held,
        "gradients": 2 * held,
        **_micro_batch(config, vocab_size, learner),
        "reference": held if config.grpo.kl_coefficient else 0,
        "versions": (config.grpo.staleness + 1) * held if config.grpo.staleness else 0,
    }
    sampling = _sampling(config, vocab_size, sampler)
    apart = sampler is not learner
    copies = apart or learner.size > 1
    own = config.grpo.turn_credit.enabled and not is_anchor(config)
    sampling = {
        "sampler_parameters": sizes.bytes_on(sampler, gathered=True) if copies else 0,
        "probe_reference": trained.bytes_on(sampler) if own else 0,
        **sampling,
    }
    sums = {"learner": sum(learning.values()), "sampler": sum(sampling.values())}
    total = max(sums.values()) if apart else sum(sums.values())
    return {**learning, **sampling, **sums, "total": total}


def _micro_batch(config: RunConfig, vocab_size: int, mesh: Mesh) -> dict[str, int]:
    """Of one micro-batch of GRPO on each device, forward and backward."""
    policy, shape = config.policy, config.grpo.microbatch
    tensor, wide = mesh.shape["tensor"], np.dtype(policy.dtype).itemsize
    rows = shape.rows / (mesh.shape["data"] * mesh.shape["fsdp"])
    tokens = rows * shape.row_length
    query, shared = policy.heads * policy.head_dim / tensor, policy.kv_heads * policy.head_dim / tensor
    # Input, its norm, sum after attention, its norm; queries as they come, normalised, rotated and as attention stores
    # them, and its outputs; keys and values likewise; gate, its activation, up and their product.
    # A mixer of a delta layer keeps about as much as attention of its width, float32.
    key, value = (policy.delta_key_heads * policy.delta_key_dim, policy.delta_value_heads * policy.delta_value_dim)
    query, shared = max(query, 4 * key / tensor), max(shared, 4 * value / tensor)
    hidden = policy.mlp_width + policy.experts_per_token * policy.expert_width + policy.shared_expert_width
    copies = policy.experts_per_token * 2 * policy.width  # inputs and results of a token's experts
    layer = wide * (4 * policy.width + 5 * query + 4 * shared + 4 * hidden / tensor + copies)
    kept = {  # of a layer whose turn has not come: all, matmul results and its input, its input
        "none": layer,
        "dots": wide * (3 * policy.width + query + 2 * shared + 2 * hidden / tensor),
        "full": wide * policy.width,
    }[policy.remat]
    layers = layer + (policy.layers - 1) * kept
    # Queries whose attention weights exist at once: a block. The CPU's compiler does not mind the order of blocks and
    # keeps those of all, half of which are masked out.
    block = max(64, -(-shape.row_length // 512) * 64)
    if jax.default_backend() == "cpu":
        block = max(block, shape.row_length // 2)
    weights = 3 * FLOAT * rows * (policy.heads / tensor) * block * shape.row_length
    bias = FLOAT * rows * shape.row_length**2
    scores = SCORE_COPIES * FLOAT * min(SCORE_CHUNK, tokens) * vocab_size / tensor
    streams = sum(x.nbytes for x in jax.tree.leaves(packing.empty_batch(1, 1, config.rollout.top_k)))
    return {
        "activations": int(tokens * (layers + 2 * wide * policy.width) + weights + bias),
        "scores": int(scores),
        "batch": int(2 * tokens * streams),  # the next one is on its way
    }


def _sampling(config: RunConfig, vocab_size: int, mesh: Mesh) -> dict[str, int]:
    """Of the slots on each device."""
    policy, rollout = config.policy, config.rollout
    tensor = mesh.shape["tensor"]
    slots = -(-rollout.slots // (mesh.size // (tensor * mesh.shape["expert"])))
    block = default_block()
    positions = -(-rollout.context // block) * block
    kinds = mixers(policy)
    token = 2 * kinds.count(ATTENTION) * policy.kv_heads / tensor * policy.head_dim
    state = policy.delta_value_heads * policy.delta_key_dim * policy.delta_value_dim / tensor * kinds.count(DELTA)
    cache = positions * token * np.dtype(rollout.cache_dtype).itemsize + FLOAT * state
    return {
        "kv_cache": int(slots * cache),
        "sampling": int(SCORE_COPIES * FLOAT * slots * vocab_size),
    }
