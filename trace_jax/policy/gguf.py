"""Weights of GGUF files (llama.cpp) as the tensors of a Hugging Face checkpoint (package `gguf`, extra `hf`).

Read is the architecture "llama" (SmolLM2). Quantised tensors become float32 when they are used. llama.cpp turns the
halves of a head's rotary pairs into neighbours; the rows of query and key are put back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trace_jax.config import ConfigError, PolicyConfig
from trace_jax.config_rules_policy import RANGES, check_policy, outside
from trace_jax.policy.gguf_tokenizer import metadata_of

_SIZES = {
    "layers": "block_count",
    "width": "embedding_length",
    "heads": "attention.head_count",
    "mlp_width": "feed_forward_length",
    "max_length": "context_length",
}
# What else changes the computation, and the values with which it does not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scale_linear": (1,),
    "rope.scaling.factor": (1, 0),
    "expert_count": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Entry(NamedTuple):
    """A tensor: its type once it is read (as safetensors names it), its shape, its name in the file."""

    dtype: str
    shape: tuple[int, ...]
    stored: str


class GgufFile:
    """The tensors of a file under the names of `transformers`, and what its metadata says; a `hf_read.Source`."""

    def __init__(self, path: str | Path):
        """
        Raises:
            ConfigError: it is missing, damaged, of another architecture, or the package `gguf` is not installed.
        """
        self.where = Path(path)
        reader = _reader(self.where)
        self.metadata = metadata_of(reader)
        kind = self.metadata.get("general.architecture")
        if kind != "llama":
            raise ConfigError(f"import: {path} has architecture {kind!r}: of GGUF only llama is read, use safetensors")
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.entries: Mapping[str, Entry] = {
            _renamed(name): Entry("F32", tuple(int(n) for n in reversed(t.shape)), name)
            for name, t in self._tensors.items()
        }
        strange = [name for name in self.entries if not name.startswith("model.") and name != "lm_head.weight"]
        if strange:  # rope_freqs scales positions, blk.N.attn_q_norm normalises, ...
            raise ConfigError(f"import: {path} holds {strange[0]!r}, which is not supported: choose another checkpoint")
        self.config = _config(self.metadata, tied="output.weight" not in self._tensors, where=self.where)

    def array(self, name: str) -> np.ndarray:
        """A tensor in float32.

        Raises:
            ConfigError: its quantisation is unknown.
        """
        import gguf

        entry = self.entries[name]
        tensor = self._tensors[entry.stored]
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ConfigError(f"import: {self.where}: {entry.stored} has type {kind}, which is not read") from error
        values = values.reshape(entry.shape)
        for part, heads in (("q_proj", self.config.heads), ("k_proj", self.config.kv_heads)):
            if name.endswith(f"{part}.weight"):
                return _apart(values, heads)
        return values


def _apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head that are pairs of neighbours, [h / 2, 2], as two halves, [2, h / 2]."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _reader(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("import: reading GGUF needs the package `gguf`: pip install 'trace-jax[hf]'") from error
    try:
        return gguf.GGUFReader(os.fspath(path))
    except OSError as error:
        raise ConfigError(f"import: cannot read {path}: {error.strerror or error}; copy it again") from error
    except Exception as error:  # cut-off files surface as ValueError, IndexError, ...
        raise ConfigError(f"import: {path} is no GGUF file, or a damaged one: copy it again") from error


def _renamed(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    stem, _, end = rest.rpartition(".")
    known = name.startswith("blk.") and block.isdigit() and stem in _LAYER
    return f"model.layers.{block}.{_LAYER[stem]}.{end}" if known else name


def _config(metadata: Mapping[str, Any], tied: bool, where: Path) -> PolicyConfig:
    def value(name: str, default: Any = None) -> Any:
        found = metadata.get(f"llama.{name}", default)
        if not isinstance(found, (int, float)) or isinstance(found, bool) or found <= 0:
            raise ConfigError(f"import: {where}: llama.{name} is missing or no number above 0: copy the file again")
        return found

    for name, neutral in _NEUTRAL.items():
        found = metadata.get(f"llama.{name}")
        if found is not None and found not in neutral:
            raise ConfigError(
                f"import: {where}: llama.{name} {found!r} is not supported: choose another checkpoint, or safetensors"
            )
    sizes = {ours: int(value(theirs)) for ours, theirs in _SIZES.items()}
    for ours, theirs in _SIZES.items():
        if bounds := ours != "max_length" and outside(sizes[ours], *RANGES[f"policy.{ours}"]):
            raise ConfigError(f"import: {where}: llama.{theirs} is {sizes[ours]}: it must be {bounds}")
    head_dim = int(value("attention.key_length", sizes["width"] // sizes["heads"]))
    for name in ("rope.dimension_count", "attention.value_length"):
        if value(name, head_dim) != head_dim:
            raise ConfigError(f"import: {where}: llama.{name} differs from the width of a head ({head_dim})")
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    cfg = PolicyConfig(
        **sizes,
        vocab_size=int(value("vocab_size", len(tokens))),
        kv_heads=int(value("attention.head_count_kv", sizes["heads"])),
        head_dim=head_dim,
        rope_theta=float(value("rope.freq_base", 10000.0)),
        norm_eps=float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),  # stored in single precision
        qk_norm=False,
        tie_embeddings=tied,
    )
    try:
        check_policy(cfg)
    except ConfigError as error:
        raise ConfigError(f"import: {where}: {error}") from None
    return cfg
