"""Weights of a checkpoint straight into (sharded) arrays: every parameter is filled layer by layer from tensors that
are read as they are used, so that the host holds one shard of one parameter at a time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array

from trace_jax.config import ConfigError, PolicyConfig
from trace_jax.policy import parameters
from trace_jax.policy.hf_files import DTYPES, SHORT, common, is_finite
from trace_jax.policy.hf_names import EMBEDDING, HEAD, Piece, Tensor, tensors

PREFIXES = ("model.", "model.language_model.", "")
# Parts of a checkpoint beside the language model: not read, and counted.
_ASIDE = {
    "vision": ("model.visual.", "visual."),
    "multi-token prediction": ("mtp.", "model.mtp."),
}
_BUFFERS = ("rotary_emb.inv_freq",)  # old files hold them; they are computed here
_ROWS = 4096  # that are compared at a time
_SHOWN = 3
_WITHOUT_LOSS = ("BF16", "F16", "F32")  # in float32


class Source(Protocol):
    """The tensors of a checkpoint by name; `entries` have a `dtype` (as safetensors names it) and a `shape`."""

    where: Any
    entries: Mapping[str, Any]

    def array(self, name: str) -> np.ndarray:
        """A tensor."""
        ...


@dataclass(frozen=True)
class Origin:
    """How a checkpoint was stored, so that an export can be stored like it.

    Attributes:
        dtype: of most tensors, as safetensors names it (float32 where it was float64). others: of the rest, by names
            without prefix.
        fused: whether the experts of a layer are fused.
        max_length: positions it was made for.
        tokens: ids that its config.json names (`eos_token_id`, ...).
    """

    dtype: str = "F32"
    others: Mapping[str, str] = field(default_factory=dict)
    fused: bool | None = None
    max_length: int | None = None
    tokens: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return dataclasses.asdict(self)


class Resolved(NamedTuple):
    """What to read.

    Attributes:
        names: where each tensor is found.
        origin: how they are stored.
        notes: lines for the user about what is not read.
    """

    names: list[tuple[Tensor, str]]
    origin: Origin
    notes: list[str]


def resolve(source: Source, cfg: PolicyConfig, vocab_size: int) -> Resolved:
    """Finds all tensors of a policy; reads none but those that must be compared.

    Raises:
        ConfigError: a tensor is missing, or of another shape or an unknown type; the files hold what the policy has
            not; heads are tied in config.json and differ in the files.
    """
    held, where = source.entries, source.where
    prefix = next((p for p in PREFIXES if p + EMBEDDING in held), PREFIXES[0])
    fused = any(name.startswith(f"{prefix}layers.") and name.endswith("experts.gate_up_proj") for name in held)
    names = []
    rounded: dict[str, list[str]] = {"float32": [], "bfloat16": []}
    for tensor in tensors(cfg, vocab_size, fused):
        name = tensor.name if tensor.name == HEAD else prefix + tensor.name
        if name not in held:
            raise ConfigError(f"import: {where} holds no tensor {name!r}: is a weight file missing?")
        if held[name].shape != tensor.shape:
            found = list(held[name].shape)
            said = "config.json says" if Path(where).is_dir() else "the metadata says"
            raise ConfigError(f"import: {where}: {name} is {found} on disk, {said} {list(tensor.shape)}")
        if held[name].dtype not in DTYPES:
            raise ConfigError(f"import: {where}: {name} has type {held[name].dtype}, which is not read: use bfloat16")
        names.append((tensor, name))
        if held[name].dtype not in (_WITHOUT_LOSS if cfg.param_dtype == "float32" else ("BF16",)):
            rounded[cfg.param_dtype].append(tensor.name)
    known = {name for _, name in names}
    if cfg.tie_embeddings and HEAD in held:
        _check_tied(source, prefix + EMBEDDING)
        known.add(HEAD)
    notes = _rest(source, prefix, known)
    for dtype, found in rounded.items():
        if found:
            notes.append(f"{_count(len(found), 'tensor')} rounded to {dtype} (policy.param_dtype): {_first(found)}")
    kept = {name: "F32" if held[name].dtype == "F64" else held[name].dtype for _, name in names}
    dtype = common(kept.values())
    others = {tensor.name: kept[name] for tensor, name in names if kept[name] != dtype}
    return Resolved(names, Origin(dtype, others, fused if cfg.experts else None), notes)


def read(
    source: Source,
    found: Resolved,
    cfg: PolicyConfig,
    vocab_size: int,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Array]:
    """Parameters by name, in `cfg.param_dtype`.

    Args:
        shardings: of every parameter; default: on the first device.
        progress: called with the number of tensors read and of all; what it raises ends the work.

    Raises:
        ConfigError: a tensor holds what is no finite number.
    """
    places: dict[str, dict[tuple[int, ...], tuple[Piece, str]]] = {}
    for tensor, name in found.names:
        for piece in tensor.pieces:
            places.setdefault(piece.parameter, {})[piece.at] = (piece, name)
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    seen: set[str] = set()

    def used(name: str) -> np.ndarray:
        progress(len(seen), len(found.names))
        seen.add(name)
        return source.array(name)

    def checked(name: str, part: np.ndarray) -> None:
        if not is_finite(part):
            raise ConfigError(f"import: {source.where}: {name} holds NaN or infinite numbers: copy it again")

    result = {}
    for name, declared in parameters.declare(cfg, vocab_size).items():
        sharding = alone if shardings is None else shardings[name]
        result[name] = _filled(declared.shape, DTYPES[SHORT[cfg.param_dtype]], sharding, places[name], used, checked)
    progress(len(found.names), len(found.names))
    return result


def _filled(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
    pieces: Mapping[tuple[int, ...], tuple[Piece, str]],
    used: Callable[[str], np.ndarray],
    checked: Callable[[str, np.ndarray], None],
) -> Array:
    depth = len(next(iter(pieces)))

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        out = np.empty([stop - start for start, stop in bounds], dtype)
        inner = tuple(slice(*b) for b in bounds[depth:])
        for at in itertools.product(*(range(*b) for b in bounds[:depth])):
            piece, name = pieces[at]
            target = out[tuple(i - start for i, (start, _) in zip(at, bounds[:depth], strict=True))]
            with np.errstate(over="ignore"):  # of float64: it becomes infinite, which is found
                np.copyto(target, piece.view(used(name)).reshape(shape[depth:])[inner], casting="unsafe")
            checked(name, target)
        return out

    return jax.make_array_from_callback(shape, sharding, shard)


def _check_tied(source: Source, embedding: str) -> None:
    head, table = source.entries[HEAD], source.array(embedding)
    same = head.shape == table.shape and head.dtype in DTYPES
    rows = range(0, len(table), _ROWS) if same else ()
    if not same or not all(np.array_equal(source.array(HEAD)[i : i + _ROWS], table[i : i + _ROWS]) for i in rows):
        raise ConfigError(
            f"import: {source.where}: {HEAD} differs from {embedding}, though config.json ties them: set "
            "tie_word_embeddings to false there to use both, or delete the tensor"
        )


def _rest(source: Source, prefix: str, known: set[str]) -> list[str]:
    """Lines about tensors that are not read. ConfigError: one of them is part of the language model."""
    rest = [name for name in source.entries if name not in known and not name.endswith(_BUFFERS)]
    notes = []
    aside = {what: [n for n in rest if n.startswith(starts)] for what, starts in _ASIDE.items()}
    counts = [f"{len(names)} of {what}" for what, names in aside.items() if names]
    if counts:
        notes.append(f"tensors left out: {', '.join(counts)}")
    left = {name for names in aside.values() for name in names}
    unknown = [name for name in rest if name not in left]
    ours = (prefix,) if prefix else ("layers.", "norm.", "embed_tokens.")
    if inside := [name for name in unknown if name.startswith((*ours, "lm_head."))]:
        raise ConfigError(
            f"import: {source.where} holds {_count(len(inside), 'tensor')} that the model of config.json lacks "
            f"({_first(inside)}): is it the config.json of another model?"
        )
    if unknown:
        notes.append(f"{_count(len(unknown), 'unknown tensor')} left out: {_first(unknown)}")
    return notes


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _first(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
