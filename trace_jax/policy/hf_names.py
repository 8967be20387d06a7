"""Names and layouts of the tensors of Hugging Face checkpoints, both ways.

On disk every layer has tensors of its own, matrices are [out, in], and some hold several of our parameters. A `Piece`
says which part of a tensor belongs where: its `view` of the tensor has the axes of our parameter in our order, so that
reading copies from the view and writing copies into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from trace_jax.config import PolicyConfig
from trace_jax.config_rules_policy import ATTENTION, mixers

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
View = Callable[[np.ndarray], np.ndarray]


class Piece(NamedTuple):
    """A part of a tensor.

    Attributes:
        parameter: ours.
        at: its place on the leading axes of the parameter: (), (layer,) or (layer, expert); layers are counted among
            those that have the parameter.
        view: the part of the tensor, without a copy. Head axes may be apart that the parameter has as one.
    """

    parameter: str
    at: tuple[int, ...]
    view: View


class Tensor(NamedTuple):
    """A tensor of a checkpoint: its name without a prefix, its shape, and what it holds."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def tensors(cfg: PolicyConfig, vocab_size: int, fused: bool) -> list[Tensor]:
    """All tensors of a policy, layer by layer, with the names they have after `model.` (the head: as it is).

    Args:
        fused: the experts of a layer are two tensors, not three of each expert.
    """
    found = [_whole("embedding", EMBEDDING, (vocab_size, cfg.width))]
    counts: dict[str, int] = {}
    for layer, kind in enumerate(mixers(cfg)):
        place = counts.get(kind, 0)
        counts[kind] = place + 1
        mixing = _attention(cfg, place) if kind == ATTENTION else _delta(cfg, place)
        feeding = _experts(cfg, layer, fused) if cfg.experts else _dense(cfg, layer)
        norms = [
            _vector("attention_norm", layer, "input_layernorm", cfg.width),
            _vector("mlp_norm", layer, "post_attention_layernorm", cfg.width),
        ]
        found += [t._replace(name=f"layers.{layer}.{t.name}") for t in (norms[0], *mixing, norms[1], *feeding)]
    found.append(_whole("final_norm", "norm.weight", (cfg.width,)))
    if not cfg.tie_embeddings:
        head = Piece("head", (), np.transpose)
        found.append(Tensor(HEAD, (vocab_size, cfg.width), (head,)))
    return found


def _attention(cfg: PolicyConfig, place: int) -> list[Tensor]:
    heads, width, wide = cfg.heads, cfg.head_dim, cfg.width
    found = [_matrix("query", place, "self_attn.q_proj", heads * width, wide)]
    if cfg.attention_gate:  # rows by head: those of the query, then those of its gate

        def part(which: int) -> View:
            return lambda disk: disk.reshape(heads, 2, width, wide)[:, which].transpose(2, 0, 1)

        pieces = (Piece("query", (place,), part(0)), Piece("query_gate", (place,), part(1)))
        found = [Tensor("self_attn.q_proj.weight", (2 * heads * width, wide), pieces)]
    found += [
        _matrix("key", place, "self_attn.k_proj", cfg.kv_heads * width, wide),
        _matrix("value", place, "self_attn.v_proj", cfg.kv_heads * width, wide),
        _matrix("output", place, "self_attn.o_proj", wide, heads * width),
    ]
    if cfg.qk_norm:
        found += [_vector(f"{n}_norm", place, f"self_attn.{n[0]}_norm", width) for n in ("query", "key")]
    return found


def _delta(cfg: PolicyConfig, place: int) -> list[Tensor]:
    key, value = cfg.delta_key_heads * cfg.delta_key_dim, cfg.delta_value_heads * cfg.delta_value_dim
    parts = {"query": slice(0, key), "key": slice(key, 2 * key), "value": slice(2 * key, 2 * key + value)}
    rows, heads = 2 * key + value, cfg.delta_value_heads
    joined = tuple(Piece(f"delta_{n}", (place,), lambda disk, at=at: disk[at].T) for n, at in parts.items())
    kernel = tuple(Piece(f"conv_{n}", (place,), lambda disk, at=at: disk[at, 0]) for n, at in parts.items())
    found = [
        Tensor("in_proj_qkv.weight", (rows, cfg.width), joined),
        _matrix("delta_gate", place, "in_proj_z", value, cfg.width),
        _matrix("delta_beta", place, "in_proj_b", heads, cfg.width),
        _matrix("delta_decay", place, "in_proj_a", heads, cfg.width),
        Tensor("conv1d.weight", (rows, 1, cfg.conv_width), kernel),
        Tensor("A_log", (heads,), (Piece("decay_rate", (place,), _same),)),
        Tensor("dt_bias", (heads,), (Piece("decay_bias", (place,), _same),)),
        _vector("delta_norm", place, "norm", cfg.delta_value_dim),
        _matrix("delta_output", place, "out_proj", cfg.width, value),
    ]
    return [t._replace(name=f"linear_attn.{t.name}") for t in found]


def _dense(cfg: PolicyConfig, layer: int) -> list[Tensor]:
    return _swiglu("", layer, "mlp", cfg.mlp_width, cfg.width)


def _swiglu(prefix: str, layer: int, name: str, inner: int, width: int) -> list[Tensor]:
    return [
        _matrix(f"{prefix}gate", layer, f"{name}.gate_proj", inner, width),
        _matrix(f"{prefix}up", layer, f"{name}.up_proj", inner, width),
        _matrix(f"{prefix}down", layer, f"{name}.down_proj", width, inner),
    ]


def _experts(cfg: PolicyConfig, layer: int, fused: bool) -> list[Tensor]:
    count, inner, width = cfg.experts, cfg.expert_width, cfg.width
    found = [_matrix("router", layer, "mlp.gate", count, width)]
    if fused:
        joined = (
            Piece("expert_gate", (layer,), lambda disk: disk[:, :inner].swapaxes(1, 2)),
            Piece("expert_up", (layer,), lambda disk: disk[:, inner:].swapaxes(1, 2)),
        )
        down = Piece("expert_down", (layer,), lambda disk: disk.swapaxes(1, 2))
        found += [
            Tensor("mlp.experts.gate_up_proj", (count, 2 * inner, width), joined),
            Tensor("mlp.experts.down_proj", (count, width, inner), (down,)),
        ]
    else:
        for expert in range(count):
            for tensor in _swiglu("expert_", layer, f"mlp.experts.{expert}", inner, width):
                found.append(tensor._replace(pieces=tuple(p._replace(at=(layer, expert)) for p in tensor.pieces)))
    if cfg.shared_expert_width:
        found += _swiglu("shared_", layer, "mlp.shared_expert", cfg.shared_expert_width, width)
        share = Piece("shared_share", (layer,), lambda disk: disk[0])
        found.append(Tensor("mlp.shared_expert_gate.weight", (1, width), (share,)))
    return found


def _same(disk: np.ndarray) -> np.ndarray:
    return disk


def _whole(parameter: str, name: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, shape, (Piece(parameter, (), _same),))


def _vector(parameter: str, place: int, name: str, length: int) -> Tensor:
    return Tensor(f"{name}.weight", (length,), (Piece(parameter, (place,), _same),))


def _matrix(parameter: str, place: int, name: str, rows: int, columns: int) -> Tensor:
    return Tensor(f"{name}.weight", (rows, columns), (Piece(parameter, (place,), np.transpose),))
