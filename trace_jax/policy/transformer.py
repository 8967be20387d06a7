"""The decoder: grouped-query attention, rotary positions, RMSNorm, SwiGLU.

`qk_norm=True` is the Qwen3 dense block (RMSNorm on every query and key head), `qk_norm=False` the Llama block.

Axes: B rows, T tokens, D model width, H query heads, K key/value heads, h head width, V vocabulary, L layers.
Weights of all layers are stacked on a leading `layers` axis; training applies them by one `jax.lax.scan`, so compile
time does not grow with depth, decoding one by one, each to its own cache buffer. Head axes are stored flattened (H*h),
which makes every projection one two-dimensional matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from trace_jax.config import ConfigError, PolicyConfig
from trace_jax.policy import attention, layers
from trace_jax.policy import logprobs as scoring
from trace_jax.policy.cache import KVCache
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


def _check(cfg: PolicyConfig) -> None:
    if cfg.heads % cfg.kv_heads:
        raise ConfigError(f"policy.heads {cfg.heads} is not a multiple of policy.kv_heads {cfg.kv_heads}: change one")
    if cfg.head_dim % 2:
        raise ConfigError(f"policy.head_dim {cfg.head_dim} is odd: rotary positions need an even head width")
    if cfg.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"policy.dtype {cfg.dtype!r} is unknown: use float32 or bfloat16")
    if cfg.remat not in REMAT:
        raise ConfigError(f"policy.remat {cfg.remat!r} is unknown: use one of {', '.join(REMAT)}")


class Transformer(nnx.Module):
    """A causal decoder without host state; parameters are float32, `cfg.dtype` is the compute type."""

    def __init__(self, cfg: PolicyConfig, vocab_size: int, *, rngs: nnx.Rngs):
        """Weights are drawn with standard deviation 1/sqrt(fan in), residual outputs scaled down by sqrt(2L).

        Raises:
            ConfigError: sizes that do not fit together.
        """
        _check(cfg)
        self.cfg = cfg
        self.vocab_size = vocab_size
        depth, width, mlp = cfg.layers, cfg.width, cfg.mlp_width
        heads, kv_heads = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        residual = (2 * depth) ** -0.5

        def matrix(shape, axes, scale):
            return nnx.Param(scale * jax.random.normal(rngs.params(), shape), logical_axes=axes)

        def gain(shape, axes):
            return nnx.Param(jnp.ones(shape), logical_axes=axes)

        self.embedding = matrix((vocab_size, width), ("vocab", "embed"), width**-0.5)
        self.attention_norm = gain((depth, width), ("layers", "embed"))
        self.query = matrix((depth, width, heads), ("layers", "embed", "heads"), width**-0.5)
        self.key = matrix((depth, width, kv_heads), ("layers", "embed", "kv_heads"), width**-0.5)
        self.value = matrix((depth, width, kv_heads), ("layers", "embed", "kv_heads"), width**-0.5)
        self.output = matrix((depth, heads, width), ("layers", "heads", "embed"), residual * heads**-0.5)
        if cfg.qk_norm:
            self.query_norm = gain((depth, cfg.head_dim), ("layers", "head_dim"))
            self.key_norm = gain((depth, cfg.head_dim), ("layers", "head_dim"))
        self.mlp_norm = gain((depth, width), ("layers", "embed"))
        self.gate = matrix((depth, width, mlp), ("layers", "embed", "mlp"), width**-0.5)
        self.up = matrix((depth, width, mlp), ("layers", "embed", "mlp"), width**-0.5)
        self.down = matrix((depth, mlp, width), ("layers", "mlp", "embed"), residual * mlp**-0.5)
        self.final_norm = gain((width,), ("embed",))
        if not cfg.tie_embeddings:
            self.head = matrix((width, vocab_size), ("embed", "vocab"), width**-0.5)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        placement: Placement = ANYWHERE,
        branches: attention.Branches | None = None,
    ) -> Float[Array, "B T D"]:
        """Hidden states of packed rows for training: causal attention inside equal segment ids.

        Args:
            ids: token ids.
            positions: position of each token in its own sequence, from 0.
            segments: sequence number of each token in its row, from 1; 0 is padding (its hidden states are finite and
                mean nothing).
            placement: of arrays on a mesh.
            branches: continuations from inside a sequence; their positions go on from where they begin.
        """
        cfg, (rows, time) = self.cfg, ids.shape
        rope = attention.rope_table(positions, cfg.head_dim, cfg.rope_theta)
        bias = attention.packed_bias(segments, positions, branches)
        one_cpu = jax.default_backend() == "cpu" and placement is ANYWHERE
        at_once = attention.rows_in_cache(rows, time, cfg.heads) if one_cpu else None

        def norm(x, weights, name):
            gain = layers.in_use(weights[name], self._axes(name), placement)
            return layers.normalise(x, gain, cfg.norm_eps)

        def linear(x, weights, name):
            return checkpoint_name(layers.linear(x, weights[name], self._axes(name), placement), "matmul")

        def layer(x, weights):
            h = norm(x, weights, "attention_norm")
            q, k, v = (linear(h, weights, name) for name in ("query", "key", "value"))
            q = q.reshape(rows, time, cfg.heads, cfg.head_dim)
            k, v = (a.reshape(rows, time, cfg.kv_heads, cfg.head_dim) for a in (k, v))
            if cfg.qk_norm:
                q, k = norm(q, weights, "query_norm"), norm(k, weights, "key_norm")
            q, k = attention.rotate(q, *rope), attention.rotate(k, *rope)
            attended = attention.packed_attention(q, k, v, bias, at_once).reshape(rows * time, -1)
            x = placement.used(x + linear(attended, weights, "output"), ("rows", ""))
            h = norm(x, weights, "mlp_norm")
            h = layers.gated(linear(h, weights, "gate"), linear(h, weights, "up"))
            return placement.used(x + linear(h, weights, "down"), ("rows", "")), None

        x = layers.lookup(self.embedding[...], ids.reshape(-1), cfg.dtype, placement)
        x = placement.used(x, ("rows", ""))
        # Unrolled, XLA's CPU backend would merge what is computed again with what was computed first, and on a mesh
        # nothing would keep the gathered weights and the unsummed gradients of all layers from existing together.
        unroll = cfg.layers <= UNROLL and cfg.remat == "none" and placement is ANYWHERE
        x, _ = jax.lax.scan(REMAT[cfg.remat](layer), x, self._layer_weights(), unroll=unroll)
        gain = layers.in_use(self.final_norm[...], ("embed",), placement)
        return layers.normalise(x, gain, cfg.norm_eps).reshape(rows, time, -1)

    def decode(
        self,
        ids: Int[Array, "n T"],
        positions: Int[Array, "n T"],
        valid: Bool[Array, "n T"],
        cache: KVCache,
        attend: int | None = None,
        rows: Int[Array, " n"] | None = None,
    ) -> tuple[Float[Array, "n T D"], KVCache]:
        """Hidden states of the next tokens of each row; their keys and values are written at `positions`.

        Args:
            ids: one token a row (decoding) or a chunk (prefill).
            positions: of each token in its row; contiguous in a chunk.
            valid: False for a token that is not there: it writes nothing and its hidden state means nothing.
            cache: donate it to the jitted caller, then the writes happen in place.
            attend: static; queries look at the blocks of the first `attend` cache positions, so it must exceed every
                valid position.
                The default, the whole length, copies nothing (see `KVCache.grow`).
            rows: cache row of each row of the call, when the call covers only some of them or in another order.
        """
        rope = attention.rope_table(positions, self.cfg.head_dim, self.cfg.rope_theta)
        target = (jnp.arange(ids.shape[0]) if rows is None else rows)[:, None]
        slots = jnp.where(valid, positions, cache.length)  # out of range: dropped
        block, inside = slots // cache.block, slots % cache.block
        seen = -(-(cache.length if attend is None else attend) // cache.block)  # blocks
        x, keys, values = self._embed(ids), [], []
        for index, (k_cache, v_cache) in enumerate(zip(cache.k, cache.v, strict=True)):
            weights = {name: stacked[index] for name, stacked in self._layer_weights().items()}
            q, k, v = self._project(x, weights, rope)
            k = k_cache.at[target, :, block, :, inside].set(k.astype(k_cache.dtype), mode="drop")
            v = v_cache.at[target, :, block, inside].set(v.astype(v_cache.dtype), mode="drop")
            keys.append(k)
            values.append(v)
            k, v = k[:, :, :seen], v[:, :, :seen]
            if rows is not None:
                k, v = k.at[rows].get(mode="clip"), v.at[rows].get(mode="clip")
            attended = attention.cache_attention(q, k, v, positions)
            x = self._residual_mlp(self._residual_attention(x, attended, weights), weights)
        return rms_norm(x, self.final_norm[...], self.cfg.norm_eps), KVCache(k=tuple(keys), v=tuple(values))

    def logits(self, hidden: Float[Array, "*n D"]) -> Float[Array, "*n V"]:
        """Scores of the next token, float32."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        weight = self.embedding[...].T if self.cfg.tie_embeddings else self.head[...]
        scores = jnp.dot(flat, weight.astype(flat.dtype), preferred_element_type=jnp.float32)
        return scores.reshape(*hidden.shape[:-1], self.vocab_size)

    def output_matrix(self) -> Float[Array, "V D"]:
        """The weights that turn hidden states into scores, one row for each id."""
        return self.embedding[...] if self.cfg.tie_embeddings else self.head[...].T

    def _axes(self, name: str) -> tuple[str, ...]:
        """Logical axes of one layer's share of a stacked parameter."""
        return getattr(self, name).get_metadata("logical_axes")[1:]

    def _embed(self, ids):
        return self.embedding[...][ids].astype(self.cfg.dtype)

    def _layer_weights(self) -> dict[str, Array]:
        names = ["attention_norm", "query", "key", "value", "output", "mlp_norm", "gate", "up", "down"]
        if self.cfg.qk_norm:
            names += ["query_norm", "key_norm"]
        return {name: getattr(self, name)[...] for name in names}

    def _project(self, x, weights, rope):
        cfg, (rows, time, _) = self.cfg, x.shape
        h = rms_norm(x, weights["attention_norm"], cfg.norm_eps).reshape(rows * time, -1)
        q = _matmul(h, weights["query"]).reshape(rows, time, cfg.heads, cfg.head_dim)
        k = _matmul(h, weights["key"]).reshape(rows, time, cfg.kv_heads, cfg.head_dim)
        v = _matmul(h, weights["value"]).reshape(rows, time, cfg.kv_heads, cfg.head_dim)
        if cfg.qk_norm:
            q = rms_norm(q, weights["query_norm"], cfg.norm_eps)
            k = rms_norm(k, weights["key_norm"], cfg.norm_eps)
        return attention.rotate(q, *rope), attention.rotate(k, *rope), v

    def _residual_attention(self, x, attended, weights):
        flat = attended.reshape(x.shape[0] * x.shape[1], -1)
        return x + _matmul(flat, weights["output"]).reshape(x.shape)

    def _residual_mlp(self, x, weights):
        h = rms_norm(x, weights["mlp_norm"], self.cfg.norm_eps).reshape(-1, x.shape[-1])
        h = jax.nn.silu(_matmul(h, weights["gate"])) * _matmul(h, weights["up"])
        return x + _matmul(h, weights["down"]).reshape(x.shape)


def rms_norm(x: Float[Array, "*n d"], gain: Float[Array, " d"], eps: float) -> Float[Array, "*n d"]:
    """Root-mean-square normalisation (arXiv 1910.07467), statistics in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * gain).astype(x.dtype)


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


def _matmul(x: Float[Array, "n a"], weight: Float[Array, "a b"]) -> Float[Array, "n b"]:
    return jnp.dot(x, weight.astype(x.dtype))
