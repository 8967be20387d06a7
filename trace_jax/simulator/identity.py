"""Ids of campaigns and advertisers: unique in a stream by construction, without a trace of index or stratum in them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

_HALF = 15  # bits of one half: ids have 30
STRATUM_BITS = 7  # 4 * cause + dimensions: up to 31 causes
INDEX_LIMIT = 2 ** (2 * _HALF - STRATUM_BITS)  # proposals of a stratum that get an id of their own
_ROUNDS = (0x9E3779B9, 0x7F4A7C15, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F)


def _mix(x: UInt32[Array, ""], salt: UInt32[Array, ""]) -> UInt32[Array, ""]:
    """A 32-bit finaliser (multiply, xor, shift): every input bit moves every output bit."""
    x = (x ^ salt) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def unique_id(
    key_data: UInt32[Array, " 2"], stratum: Int[Array, ""], index: Int[Array, ""], kind: int
) -> Int[Array, ""]:
    """Id from 1 to 2^30, a permutation (Feistel network keyed by `key_data` and `kind`) of (index, stratum).

    Two proposals of one stream never share an id as long as `index` < INDEX_LIMIT.
    """
    mask = jnp.uint32(2**_HALF - 1)
    word = (index.astype(jnp.uint32) << STRATUM_BITS) | stratum.astype(jnp.uint32)
    left, right = (word >> _HALF) & mask, word & mask
    for i, constant in enumerate(_ROUNDS):
        salt = key_data[i % 2] + jnp.uint32((constant + kind * 0x632BE5AB) % 2**32)
        left, right = right, left ^ (_mix(right, salt) & mask)
    return ((left << _HALF) | right).astype(jnp.int32) + 1


def sibling_ids(
    key_data: UInt32[Array, " 2"], stratum: Int[Array, ""], index: Int[Array, ""], count: int
) -> Int[Array, " S"]:
    """Ids of the siblings of a proposal, unique in the stream as long as `index` < INDEX_LIMIT / `count`; all from 2^30
    on, where no campaign in question has its id."""
    return jnp.stack([unique_id(key_data, stratum, index * count + s, kind=2) + (2**30 - 1) for s in range(count)])
