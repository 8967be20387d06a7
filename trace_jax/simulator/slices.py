"""Candidate slices: every value of a driver attribute and every pair of values of two of them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trace_jax.simulator.causes import CAUSES
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTES, DRIVER_ATTRIBUTES


def _candidates() -> tuple[np.ndarray, np.ndarray]:
    single = [(ATTRIBUTE_NAMES.index(a), v) for a in DRIVER_ATTRIBUTES for v in range(len(ATTRIBUTES[a]))]
    rows = [((a, -1), (v, -1)) for a, v in single]
    rows += [((a, b), (v, w)) for i, (a, v) in enumerate(single) for b, w in single[i + 1 :] if a != b]
    attributes, values = zip(*rows, strict=True)
    return np.array(attributes, np.int32), np.array(values, np.int32)


SLICE_ATTRIBUTES, SLICE_VALUES = _candidates()  # codes [K, 2], -1 unused
SLICES = len(SLICE_ATTRIBUTES)
DIMENSIONS = (SLICE_ATTRIBUTES >= 0).sum(-1)  # attributes in each slice
_SINGLE = DIMENSIONS == 1


def slice_name(k: int) -> str:
    """Candidate `k` as the tables spell it: "geo=US & device=MOBILE"."""
    pairs = [
        (ATTRIBUTE_NAMES[a], ATTRIBUTES[ATTRIBUTE_NAMES[a]][v])
        for a, v in zip(SLICE_ATTRIBUTES[k].tolist(), SLICE_VALUES[k].tolist(), strict=True)
        if a >= 0
    ]
    return " & ".join(f"{attribute}={value}" for attribute, value in sorted(pairs))


def named(attributes: Int[Array, "*E 2"], values: Int[Array, "*E 2"]) -> Bool[Array, "*E K"]:
    """Which candidate (at most one) a label's pair of codes names, in either order; none if it is (-1, -1). Of NumPy
    arrays it makes a NumPy array."""
    a, v = attributes[..., None, :], values[..., None, :]
    straight, swapped = (
        ((SLICE_ATTRIBUTES[:, order] == a) & (SLICE_VALUES[:, order] == v)).all(-1) for order in ([0, 1], [1, 0])
    )
    return straight | swapped


def single_of(name: str) -> Bool[np.ndarray, " K"]:
    """The one-attribute slices of an attribute."""
    return _SINGLE & (SLICE_ATTRIBUTES[:, 0] == ATTRIBUTE_NAMES.index(name))


def _may_sit() -> np.ndarray:
    """Cause c may be localised in slice k: it uses one of the cause's driver attributes, with an allowed value."""
    table = np.zeros((len(CAUSES), SLICES), bool)
    for c, cause in enumerate(CAUSES):
        for k in range(SLICES):
            for a, v in zip(SLICE_ATTRIBUTES[k], SLICE_VALUES[k], strict=True):
                name = ATTRIBUTE_NAMES[a] if a >= 0 else ""
                table[c, k] |= name in cause.drivers and (not cause.values or ATTRIBUTES[name][v] in cause.values)
    return table


MAY_SIT = _may_sit()


def _parts() -> np.ndarray:
    """Which one-attribute slices a slice is the intersection of [singles, K]."""
    singles = int(_SINGLE.sum())
    pairs = np.stack([SLICE_ATTRIBUTES, SLICE_VALUES], -1)
    return (pairs[:singles, None, :1] == pairs[None]).all(-1).any(-1)


_PARTS = _parts().astype(np.float32)


def members(values: Int[Array, "G A"], mask: Bool[Array, " G"]) -> Bool[Array, "G K"]:
    """Active segments of every candidate slice."""
    singles = len(_PARTS)
    hit = values[:, SLICE_ATTRIBUTES[:singles, 0]] == jnp.asarray(SLICE_VALUES[:singles, 0])[None]
    # A segment is in a slice if it has as many of its values as the slice names: a small product of exact numbers.
    return (hit.astype(jnp.float32) @ _PARTS == jnp.asarray(DIMENSIONS, jnp.float32)) & mask[:, None]


def overlaps(clicks: Float[Array, " G"], member: Float[Array, "G K"]) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
    """Share of the clicks in every slice, and its largest overlap (Jaccard index by clicks) with any other slice.

    Args:
        clicks: share of each segment, adding up to one.
        member: `members` as numbers.
    """
    share = clicks @ member
    both = (member * clicks[:, None]).T @ member
    jaccard = both / jnp.maximum(share[:, None] + share[None, :] - both, 1e-9)
    return share, jnp.where(jnp.eye(SLICES, dtype=bool), 0.0, jaccard).max(-1)
