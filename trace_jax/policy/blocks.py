"""The parts of a layer: projections with their adapters, attention and delta mixing, feed-forward.

Axes: n tokens of all rows, B rows, T tokens of a row, D model width, H query heads, K key/value heads, h head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from trace_jax.config import PolicyConfig
from trace_jax.config_rules_policy import DELTA, mixers, rotated
from trace_jax.policy import attention, delta_net, delta_rule, kernels, layers, lora, moe
from trace_jax.policy.cache import KVCache
from trace_jax.policy.placement import Placement

DELTA_SMALL = ("conv_query", "conv_key", "conv_value", "decay_rate", "decay_bias", "delta_norm")


class Block:
    """One layer's weights in use."""

    def __init__(
        self,
        cfg: PolicyConfig,
        weights: dict[str, Array],
        axes: dict[str, tuple[str, ...]],
        placement: Placement,
        adapters: lora.Adapters | None,
        pairs: dict[str, lora.Pair],
    ):
        """
        Args:
            weights: of the layer.
            axes: their logical axes.
            adapters: in use, of all layers. pairs: the layer's factors.
        """
        self.cfg, self.weights, self.placement = cfg, weights, placement
        self.adapters, self.pairs = adapters, pairs
        self._axes = axes

    def linear(self, x: Float[Array, "n a"], name: str) -> Float[Array, "n b"]:
        """A projection, with what the tokens' adapters add."""
        axes = self._axes[name]
        y = layers.linear(x, self.weights[name], axes, self.placement)
        if name in self.pairs:
            y = lora.add(y, x, self.pairs[name], self.adapters, axes, self.placement)
        return checkpoint_name(y, "matmul")

    def used(self, name: str) -> Array:
        """A small parameter (a gain, a kernel)."""
        return layers.in_use(self.weights[name], self._axes[name], self.placement)

    def small(self, names: tuple[str, ...]) -> dict[str, Array]:
        """Small parameters by name."""
        return {name: self.used(name) for name in names}

    def norm(self, x: Float[Array, "*n a"], name: str) -> Float[Array, "*n a"]:
        """Root-mean-square normalisation with a gain of the layer."""
        return layers.normalise(x, offset(self.cfg, self.used(name)), self.cfg.norm_eps)


def offset(cfg: PolicyConfig, gain: Float[Array, " a"]) -> Float[Array, " a"]:
    """A stored gain as it scales."""
    return 1.0 + gain.astype(jnp.float32) if cfg.norm_offset else gain


def feed_forward(
    block: Block, h: Float[Array, "n D"], chosen: Int[Array, "n k"] | None
) -> tuple[Float[Array, "n D"], moe.Routes | None]:
    """What a layer does to every token by itself, and the experts it had.

    Args:
        chosen: experts to use in place of the likeliest.
    """
    if block.cfg.experts:
        adapters = block.adapters and block.adapters._replace(pairs=block.pairs)
        y, routes = moe.feed_forward(h, block.weights, block.cfg, block.linear, block.placement, chosen, adapters)
        return checkpoint_name(y, "matmul"), routes
    h = layers.gated(block.linear(h, "gate"), block.linear(h, "up"))
    return block.linear(h, "down"), None


def _heads(block: Block, h: Float[Array, "n D"], shape: tuple[int, int], rope) -> tuple[Array, Array, Array]:
    """Queries, keys and values by head, normalised and rotated."""
    cfg = block.cfg
    q, k, v = (block.linear(h, name) for name in ("query", "key", "value"))
    q = q.reshape(*shape, cfg.heads, cfg.head_dim)
    k, v = (a.reshape(*shape, cfg.kv_heads, cfg.head_dim) for a in (k, v))
    if cfg.qk_norm:
        q, k = block.norm(q, "query_norm"), block.norm(k, "key_norm")
    return attention.rotate_part(q, *rope), attention.rotate_part(k, *rope), v


def _attended(block: Block, h: Float[Array, "n D"], attended: Float[Array, "B T H h"]) -> Float[Array, "n D"]:
    """The output projection of what was attended to, gated by the layer's input if the policy does so."""
    attended = attended.reshape(len(h), -1)
    if block.cfg.attention_gate:
        attended = attended * jax.nn.sigmoid(block.linear(h, "query_gate"))
    return block.linear(attended, "output")


class Packed:
    """Mixing of tokens in packed training rows. What all layers share is computed once."""

    def __init__(
        self,
        cfg: PolicyConfig,
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        placement: Placement,
        branches: attention.Branches | None,
    ):
        self._shape = positions.shape
        self._rope = attention.rope_table(positions, rotated(cfg), cfg.rope_theta)
        self._attend = kernels.packed(cfg, positions, segments, placement, branches)
        reach = cfg.conv_width - 1
        self._layout = delta_rule.layout(segments, positions, branches, reach) if DELTA in mixers(cfg) else None

    def attention(self, block: Block, h: Float[Array, "n D"]) -> Float[Array, "n D"]:
        """Causal attention inside segments."""
        q, k, v = _heads(block, h, self._shape, self._rope)
        return _attended(block, h, self._attend(q, k, v))

    def delta(self, block: Block, h: Float[Array, "n D"]) -> Float[Array, "n D"]:
        """The gated delta rule inside segments."""
        mixed = delta_net.mix(h, block.small(DELTA_SMALL), block.cfg, self._layout, block.linear)
        return block.linear(mixed.reshape(len(h), -1), "delta_output")


class Cached:
    """Mixing of new tokens with those in the cache, which it takes up layer by layer."""

    def __init__(
        self,
        cfg: PolicyConfig,
        positions: Int[Array, "n T"],
        valid: Bool[Array, "n T"],
        cache: KVCache,
        attend: int | None,
        rows: Int[Array, " n"] | None,
    ):
        self._positions, self._valid, self._rows = positions, valid, rows
        self._rope = attention.rope_table(positions, rotated(cfg), cfg.rope_theta)
        self._target = (jnp.arange(len(positions)) if rows is None else rows)[:, None]
        slots = jnp.where(valid, positions, cache.length)  # out of range: dropped
        self._block, self._inside = slots // cache.block, slots % cache.block
        self._seen = -(-(cache.length if attend is None else attend) // cache.block)  # blocks
        self._waiting = (list(zip(cache.k, cache.v, strict=True)), list(cache.delta))
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._states: list[Any] = []

    @property
    def cache(self) -> KVCache:
        """The cache after all layers."""
        return KVCache(k=tuple(self._keys), v=tuple(self._values), delta=tuple(self._states))

    def attention(self, block: Block, h: Float[Array, "m D"]) -> Float[Array, "m D"]:
        """Attention over the next layer's cache, to which keys and values are written at `positions` first."""
        q, k, v = _heads(block, h, self._positions.shape, self._rope)
        k_cache, v_cache = self._waiting[0].pop(0)
        k = k_cache.at[self._target, :, self._block, :, self._inside].set(k.astype(k_cache.dtype), mode="drop")
        v = v_cache.at[self._target, :, self._block, self._inside].set(v.astype(v_cache.dtype), mode="drop")
        self._keys.append(k)
        self._values.append(v)
        k, v = k[:, :, : self._seen], v[:, :, : self._seen]
        if self._rows is not None:
            k, v = k.at[self._rows].get(mode="clip"), v.at[self._rows].get(mode="clip")
        return _attended(block, h, attention.cache_attention(q, k, v, self._positions))

    def delta(self, block: Block, h: Float[Array, "m D"]) -> Float[Array, "m D"]:
        """The gated delta rule from the next layer's state."""
        whole = self._waiting[1].pop(0)
        rows = self._rows
        state = whole if rows is None else jax.tree.map(lambda x: x.at[rows].get(mode="clip"), whole)
        fresh = self._positions[:, 0] == 0
        weights = block.small(DELTA_SMALL)
        mixed, state = delta_net.step(h, weights, block.cfg, state, self._valid, fresh, block.linear)
        if rows is not None:
            state = jax.tree.map(lambda x, new: x.at[rows].set(new, mode="drop"), whole, state)
        self._states.append(state)
        return block.linear(mixed.reshape(len(h), -1), "delta_output")
