"""The decoder of all policies; `PolicyConfig` chooses its blocks.

Every layer mixes tokens (grouped-query attention, or a gated delta net) and then works on each (SwiGLU, or a mixture of
experts). The Llama block, Qwen3 (RMSNorm on every query and key head), Qwen3-MoE and Qwen3.5-MoE are settings of it.

Axes: B rows, T tokens, D model width, V vocabulary, L layers, k experts of a token.
Weights are stacked over layers; training applies them by one `jax.lax.scan` over what repeats, so compile time does not
grow with depth, decoding one by one, each to its own cache buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from trace_jax.config import PolicyConfig
from trace_jax.config_rules_policy import ATTENTION, check_policy
from trace_jax.policy import attention, layers, mixture, moe, parameters
from trace_jax.policy import logprobs as scoring
from trace_jax.policy.blocks import Block, Cached, Packed, feed_forward, offset
from trace_jax.policy.cache import KVCache
from trace_jax.policy.depth import Stack, each_layer, over_layers
from trace_jax.policy.lora import Adapters
from trace_jax.policy.placement import ANYWHERE, Placement

# Layers up to which the training scan is unrolled: a loop stacks and zeroes every saved activation, which costs a tenth
# of the step on CPU.
UNROLL = 8
# What is kept of a layer for the backward pass (`policy.remat`): all of it, matmul results, or only its input.
REMAT: dict[str, Callable] = {
    "none": lambda layer: layer,
    "dots": partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("matmul")),
    "full": jax.checkpoint,
}


class Pass(NamedTuple):
    """What a training pass gives.

    Attributes:
        hidden: hidden states.
        load: how many tokens (padding left out) each expert of each layer had; None without experts.
    """

    hidden: Float[Array, "B T D"]
    load: Float[Array, "L E"] | None


class Decoded(NamedTuple):
    """What a decoding call gives: hidden states, the new cache, the experts of every token (None without experts), what
    each row has locked (`mixture.Lock.weights`; None without a gate)."""

    hidden: Float[Array, "n T D"]
    cache: KVCache
    experts: Int[Array, "L n T k"] | None
    locked: Float[Array, "L n M"] | None = None


class Transformer(nnx.Module):
    """A causal decoder without host state; `cfg.dtype` is the compute type."""

    def __init__(self, cfg: PolicyConfig, vocab_size: int, *, rngs: nnx.Rngs):
        """Parameters as `parameters.declare` says, in `cfg.param_dtype`.

        Raises:
            ConfigError: sizes that do not fit together.
        """
        check_policy(cfg)
        self.cfg = cfg
        self.vocab_size = vocab_size
        for name, declared in parameters.declare(cfg, vocab_size).items():
            value = declared.make(rngs, declared.shape).astype(cfg.param_dtype)
            setattr(self, name, nnx.Param(value, logical_axes=declared.axes))

    def __call__(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        placement: Placement = ANYWHERE,
        branches: attention.Branches | None = None,
        adapters: Adapters | None = None,
    ) -> Float[Array, "B T D"]:
        """Hidden states of packed rows for training, see `run`."""
        return self.run(ids, positions, segments, placement, branches, adapters).hidden

    def run(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        placement: Placement = ANYWHERE,
        branches: attention.Branches | None = None,
        adapters: Adapters | None = None,
        experts: Int[Array, "L B T k"] | None = None,
    ) -> Pass:
        """The training pass over packed rows: no token sees another segment, or a later token.

        Args:
            ids: token ids.
            positions: position of each token in its own sequence, from 0.
            segments: sequence number of each token in its row, from 1; 0 is padding (its hidden states are finite and
                mean nothing).
            placement: of arrays on a mesh.
            branches: continuations from inside a sequence; their positions go on from where they begin.
            adapters: low-rank changes of the weights; `chosen` is [B T], `lock` that of `mixture.packed`.
            experts: those that each token had when it was sampled, used again in place of the likeliest; a negative
                one: not known.
        """
        cfg, (rows, time) = self.cfg, ids.shape
        mixing = Packed(cfg, positions, segments, placement, branches)
        wanted = (segments > 0).reshape(-1)
        gated = adapters is not None and adapters.gate is not None
        if adapters is not None and adapters.chosen is not None:
            adapters = adapters._replace(chosen=adapters.chosen.reshape(-1))

        def layer(x, given, kind):
            weights, pairs, chosen = given
            block = Block(cfg, weights, self._layer_axes, placement, adapters, pairs)
            h = placement.used(block.norm(x, "attention_norm"), ("rows", ""))
            if gated:
                shares = mixture.packed(h, weights[mixture.GATE], adapters.lock, placement)
                block.adapters = adapters._replace(shares=shares)
            mixed = mixing.attention(block, h) if kind == ATTENTION else mixing.delta(block, h)
            x = placement.used(x + mixed, ("tokens", ""))
            y, routes = feed_forward(block, placement.used(block.norm(x, "mlp_norm"), ("rows", "")), chosen)
            load = None if routes is None else moe.load(routes, wanted, cfg.experts)["experts"]
            return placement.used(x + y, ("tokens", "")), load

        # Between the parts of a layer the tokens of a row are divided over all devices that work on it (sequence
        # parallelism, arXiv 2205.05198): with `remat: full` this array is what is kept of a layer.
        x = layers.lookup(self.embedding[...], ids.reshape(-1), cfg.dtype, placement)
        x = placement.used(placement.used(x, ("rows", "")), ("tokens", ""))  # one after the other in the gradient, too
        chosen = None if experts is None else experts.reshape(cfg.layers, rows * time, -1)
        # Unrolled, XLA's CPU backend would merge what is computed again with what was computed first, and on a mesh
        # nothing would keep the gathered weights and the unsummed gradients of all layers from existing together.
        unroll = cfg.layers <= UNROLL and cfg.remat == "none" and placement is ANYWHERE
        x, load = over_layers(REMAT[cfg.remat], layer, x, self._stack(adapters, chosen), cfg, unroll)
        gain = layers.in_use(self.final_norm[...], ("embed",), placement)
        x = placement.used(layers.normalise(x, offset(cfg, gain), cfg.norm_eps), ("rows", ""))
        return Pass(x.reshape(rows, time, -1), load)

    def decode(
        self,
        ids: Int[Array, "n T"],
        positions: Int[Array, "n T"],
        valid: Bool[Array, "n T"],
        cache: KVCache,
        attend: int | None = None,
        rows: Int[Array, " n"] | None = None,
        adapters: Adapters | None = None,
    ) -> Decoded:
        """Hidden states of the next tokens of each row, and what they add to the cache.

        Args:
            ids: one token a row (decoding) or a chunk (prefill).
            positions: of each token in its row; contiguous in a chunk. A chunk that begins at 0 begins the row anew.
            valid: False for a token that is not there: it writes nothing and its hidden state means nothing. In a
                chunk such tokens are at the end.
            cache: donate it to the jitted caller, then the writes happen in place.
            attend: static; queries look at the blocks of the first `attend` cache positions, so it must exceed every
                valid position.
                The default, the whole length, copies nothing (see `KVCache.grow`).
            rows: cache row of each row of the call, when the call covers only some of them or in another order.
            adapters: `chosen` is [n], `lock` a `mixture.Lock`.
        """
        cfg, (count, time) = self.cfg, ids.shape
        mixing = Cached(cfg, positions, valid, cache, attend, rows)
        if adapters is not None and adapters.chosen is not None:
            adapters = adapters._replace(chosen=jnp.repeat(adapters.chosen, time))
        x, routes, locked = self.embedding[...][ids.reshape(-1)].astype(cfg.dtype), [], []
        for kind, (weights, pairs, _) in each_layer(self._stack(adapters, None), cfg):
            block = Block(cfg, weights, self._layer_axes, ANYWHERE, adapters, pairs)
            h = block.norm(x, "attention_norm")
            if adapters is not None and adapters.gate is not None:
                before = adapters.lock.weights[len(locked)]
                shares, now = mixture.cached(
                    h, weights[mixture.GATE], adapters.lock.prompt, before, positions, valid, ANYWHERE
                )
                block.adapters = adapters._replace(shares=shares)
                locked.append(now)
            x = x + (mixing.attention(block, h) if kind == ATTENTION else mixing.delta(block, h))
            y, chosen = feed_forward(block, block.norm(x, "mlp_norm"), None)
            x = x + y
            routes.append(chosen)
        hidden = layers.normalise(x, offset(cfg, self.final_norm[...]), cfg.norm_eps).reshape(count, time, -1)
        experts = jnp.stack([r.experts for r in routes]).reshape(cfg.layers, count, time, -1) if cfg.experts else None
        return Decoded(hidden, mixing.cache, experts, jnp.stack(locked) if locked else None)

    def logits(self, hidden: Float[Array, "*n D"]) -> Float[Array, "*n V"]:
        """Scores of the next token, float32."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        weight = self.embedding[...].T if self.cfg.tie_embeddings else self.head[...]
        scores = jnp.dot(flat, weight.astype(flat.dtype), preferred_element_type=jnp.float32)
        return scores.reshape(*hidden.shape[:-1], self.vocab_size)

    def output_matrix(self) -> Float[Array, "V D"]:
        """The weights that turn hidden states into scores, one row for each id."""
        return self.embedding[...] if self.cfg.tie_embeddings else self.head[...].T

    @property
    def _layer_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of one layer's share of every stacked parameter."""
        stacked = (name for group in parameters.names(self.cfg).values() for name in group)
        return {name: getattr(self, name).get_metadata("logical_axes")[1:] for name in stacked}

    def _stack(self, adapters: Adapters | None, chosen: Int[Array, "L n k"] | None) -> Stack:
        """Stacked parameters by the layers that have them, with adapters and their gate."""
        groups = parameters.names(self.cfg).items()
        found = {kind: {name: getattr(self, name)[...] for name in names} for kind, names in groups}
        if adapters is not None and adapters.gate is not None:
            found["all"][mixture.GATE] = adapters.gate
        return Stack(found, adapters and adapters.pairs, chosen)


def logical_axes(model: Transformer) -> nnx.State:
    """The logical axis names of every parameter: the tree of `nnx.state(model, nnx.Param)` with a tuple at each leaf.

    `jax.tree.map(f, params, logical_axes(model))` calls `f(array, names)`.
    """
    return jax.tree.map(
        lambda param: param.replace(param.get_metadata("logical_axes")),
        nnx.state(model, nnx.Param),
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )


def token_logprobs(
    model: Transformer,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    temperature: float = 1.0,
    chunk: int = 1024,
    kept: Int[Array, "B T k"] | None = None,
    wanted: Bool[Array, "B T"] | None = None,
    placement: Placement = ANYWHERE,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability of each target under softmax(logits / temperature), and the entropy of that distribution (nats).

    Tokens are handled in chunks, so the [B, T, V] array never exists (see `policy.logprobs`).

    Args:
        chunk: tokens of each block of rows that are scored at a time; their scores are the memory it takes.
        kept: ids over which the softmax runs, the target among them; negative entries are none, and a token without any
            id has the whole vocabulary. None: all tokens have. The gradient takes the set as given: it was fixed when
            the target was drawn.
        wanted: tokens to score, the others get 0; the work is that of the tokens wanted. None: all.
        placement: of arrays on a mesh.
    """
    return scoring.logprobs(hidden, model.output_matrix(), targets, kept, wanted, temperature, chunk, placement)
