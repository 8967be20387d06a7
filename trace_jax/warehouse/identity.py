"""What a set of episodes is, in one hash: the tables that agents see, and the answers.

It is taken of values, not of files: of whole numbers as they are, of amounts and shares to four decimals (money is in
cents), of words as words. Versions of file formats and libraries have no part in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from trace_jax.warehouse import materialize
from trace_jax.warehouse.splits import EpisodeSet

_BLOCK = 256  # episodes hashed at a time; part of the definition
_ANSWER = ("campaign_id", "cause", "segments", "profile", "onset")  # of gt_episode


def sha256(episodes: EpisodeSet) -> str:
    """Hash of the episodes in their order, as hexadecimal digits."""
    digest = hashlib.sha256()
    for start in range(0, len(episodes), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(episodes)))
        _update(digest, materialize.visible_chunk(episodes.batch, rows))
        hidden = materialize.hidden_chunk(episodes.batch, episodes.verdict, rows)
        _update(digest, {"gt_episode": hidden["gt_episode"].select(_ANSWER)})
    return digest.hexdigest()


def _update(digest: hashlib._Hash, tables: Mapping[str, pa.Table]) -> None:
    for name, table in tables.items():
        for column in table.schema.names:
            values = table[column].combine_chunks()
            digest.update(f"{name}.{column} {len(values)}\n".encode())
            if isinstance(values, pa.ChunkedArray):
                values = pa.concat_arrays(values.chunks)
            digest.update(_bytes(values))


def _bytes(values: pa.Array) -> bytes:
    """Values as bytes that depend on nothing else; NULL is the lowest number or the code -1."""
    if pa.types.is_dictionary(values.type):
        words = "\0".join(values.dictionary.to_pylist())
        return words.encode() + b"\n" + _whole(values.indices, -1)
    if pa.types.is_date32(values.type):
        return _whole(values.cast(pa.int32()), np.iinfo(np.int32).min)
    if pa.types.is_floating(values.type):
        return np.rint(np.asarray(values) * 1e4).astype("<i8").tobytes()
    return _whole(values, np.iinfo(np.int64).min)


def _whole(values: pa.Array, missing: int) -> bytes:
    return np.asarray(values.cast(pa.int64()).fill_null(missing)).astype("<i8").tobytes()
