"""What a set of episodes is: a hash of the tables that agents see and of the answers, and what is left of it elsewhere.

The hash is taken of values, not of files: of whole numbers as they are, of amounts and shares to four decimals (money
is in cents), of words as words. Versions of file formats and libraries have no part in it. Another kind of processor
has: XLA's float32 functions round differently with other vector instructions, and a count drawn at a rounding boundary
then comes out one higher or lower. Such a set has the same answers and, to a millionth, the same column totals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trace_jax.warehouse import materialize
from trace_jax.warehouse.splits import EpisodeSet

_BLOCK = 256  # episodes hashed at a time; part of the definition
_ANSWER = ("campaign_id", "cause", "segments", "profile", "onset")  # of gt_episode
# Relative difference of a column's total: 25 times what was seen between vector instructions at 235 episodes (4e-7),
# and a tenth or less of what other draws of the same rates give.
ROUNDING = 1e-5


def described(episodes: EpisodeSet) -> dict[str, Any]:
    """`sha256` of the episodes in their order, `answers`: that of the answers alone, both as hexadecimal digits, and
    `totals`: the sum of each column of numbers, by "table.column"."""
    whole, answers = hashlib.sha256(), hashlib.sha256()
    totals: dict[str, float] = {}
    for start in range(0, len(episodes), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(episodes)))
        visible = materialize.visible_chunk(episodes.batch, rows)
        _update(whole, visible)
        hidden = materialize.hidden_chunk(episodes.batch, episodes.verdict, rows)
        answer = {"gt_episode": hidden["gt_episode"].select(_ANSWER)}
        _update(whole, answer)
        _update(answers, answer)
        for name, column, values in _numbers(visible):
            totals[f"{name}.{column}"] = totals.get(f"{name}.{column}", 0.0) + values
    return {"sha256": whole.hexdigest(), "answers": answers.hexdigest(), "totals": totals}


def sha256(episodes: EpisodeSet) -> str:
    """Hash of the episodes in their order, as hexadecimal digits."""
    return str(described(episodes)["sha256"])


def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two descriptions are of the same episodes: equal hashes, or equal answers and totals that differ by no
    more than rounding. Descriptions without answers (of earlier versions, of other environments) have the hash only."""
    if first["sha256"] == second["sha256"]:
        return True
    ours, theirs = first.get("totals"), second.get("totals")
    if not ours or not theirs or first.get("answers") != second.get("answers") or ours.keys() != theirs.keys():
        return False
    return all(abs(ours[k] - theirs[k]) <= ROUNDING * max(abs(ours[k]), abs(theirs[k])) for k in ours)


def _numbers(tables: Mapping[str, pa.Table]) -> Iterator[tuple[str, str, float]]:
    for name, table in tables.items():
        for column in table.schema.names:
            kind = table[column].type
            if pa.types.is_integer(kind) or pa.types.is_floating(kind):
                yield name, column, float(pc.sum(pc.cast(table[column], pa.float64())).as_py() or 0.0)


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
