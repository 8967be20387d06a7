"""A softmax gate over the base and N adapters, in every layer (arXiv 2604.05336, its later version).

    g = softmax(G^T h)        y = W x + sum_n g_n scale_n A_n B_n x        the base's g, the last, adds nothing

G is zero at first, so the mixture begins uniform over the adapters and the base. `h` is what the layer's projections
are given, its normalised input, at the prompt's last token, and the weights are locked there: every token from that one
on has them, in this turn and in all later ones, whether it is sampled, fed as a tool's result, or trained on. Tokens of
the prompt before it have the base alone.

Why so: a gate that read the whole prompt while that was already mixed would need a first pass for its own input, or its
weights would change in the middle of the prompt with how it is cut into chunks. Here one pass is exact in any chunks;
sampling and packed training compute the same; and keys and values of a prompt are the base's, whatever the gate says,
so that rows of one prompt share them. The last token has read the prompt through attention; in a first layer it has
read nothing yet, and the gate there is the same for all prompts that end alike.

Axes: L layers, n tokens, B rows, T tokens of a row, D model width, N adapters, M = N + 1 with the base last.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trace_jax.config import PolicyConfig
from trace_jax.policy import layers
from trace_jax.policy.placement import Placement

GATE = "adapter_gate"  # the name of G among what is trained and among a layer's weights


class Lock(NamedTuple):
    """What rows that are decoded know of their mixtures.

    Attributes:
        prompt: tokens of each row's prompt.
        weights: of each row in every layer; what stands there before the prompt's last token was fed is not used.
    """

    prompt: Int[Array, " B"]
    weights: Float[Array, "L B M"]


def init(policy: PolicyConfig, count: int) -> dict[str, Float[Array, "L D M"]]:
    """A gate over the base and `count` adapters that prefers none."""
    return {GATE: jnp.zeros((policy.layers, policy.width, count + 1), jnp.float32)}


def axes() -> dict[str, tuple[str, ...]]:
    """Logical axes of `init`."""
    return {GATE: ("layers", "embed", "")}


def weights(h: Float[Array, "n D"], gate: Float[Array, "D M"], placement: Placement) -> Float[Array, "n M"]:
    """What every token would lock, float32."""
    gate = layers.in_use(gate, ("embed", ""), placement).astype(jnp.float32)
    return jax.nn.softmax(jnp.dot(h.astype(jnp.float32), gate, precision="highest"), axis=-1)


def packed(
    h: Float[Array, "n D"], gate: Float[Array, "D M"], lock: Int[Array, "B T"], placement: Placement
) -> Float[Array, "n N"]:
    """Weights of the adapters for each token of packed training rows.

    Args:
        gate: of the layer.
        lock: column of the token that locks the weights of each token, -1 for none: the base alone.
    """
    found = weights(h, gate, placement).reshape(*lock.shape, -1)
    mine = jnp.take_along_axis(found, jnp.maximum(lock, 0)[..., None], axis=1)[..., :-1]
    return jnp.where((lock >= 0)[..., None], mine, 0.0).reshape(len(h), -1)


def cached(
    h: Float[Array, "n D"],
    gate: Float[Array, "D M"],
    prompt: Int[Array, " B"],
    locked: Float[Array, "B M"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    placement: Placement,
) -> tuple[Float[Array, "n N"], Float[Array, "B M"]]:
    """Weights of the adapters for each new token of rows in the cache, and what their rows have locked now.

    Args:
        gate: of the layer.
        prompt, locked: see `Lock`, of the layer.
        positions, valid: of the tokens, see `Transformer.decode`.
    """
    found = weights(h, gate, placement).reshape(*positions.shape, -1)
    last = (positions == prompt[:, None] - 1) & valid
    # one token at most: the sum picks it, and no other one's number, not even a NaN of padding
    now = jnp.sum(jnp.where(last[..., None], found, 0.0), axis=1)
    locked = jnp.where(jnp.any(last, axis=1)[:, None], now, locked)
    after = (positions >= prompt[:, None] - 1) & valid
    return jnp.where(after[..., None], locked[:, None, :-1], 0.0).reshape(len(h), -1), locked
