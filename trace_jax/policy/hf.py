"""Hugging Face checkpoints: safetensors weights, config.json and tokenizer of the Qwen3 and Llama dense decoders."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.flax
import safetensors.numpy
from flax import nnx
from safetensors import SafetensorError

from trace_jax.config import ConfigError, PolicyConfig
from trace_jax.policy.chat import NanoChat
from trace_jax.policy.hf_tokenizer import tokenizer_json
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.policy.transformer import Transformer

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.model"
PARTIAL = ".partial-export"

# Our stacked parameter -> name inside a layer on disk. Matrices are stored [out, in] there, [in, out] here.
_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def export(directory: str | Path, model: Transformer, tokenizer: SentencePieceTokenizer, chat: NanoChat) -> None:
    """Writes a checkpoint that `transformers`, vLLM or `load` open: Qwen3ForCausalLM with query/key norms, else Llama.

    The files are written in a subdirectory and renamed when all are complete, config.json last: an interrupted export
    leaves the old checkpoint, the new one, or one without config.json, which nothing loads, but never a mix.

    Raises:
        ConfigError: the directory cannot be written.
    """
    directory = Path(directory)
    end, pad = tokenizer.piece(chat.stop_id), tokenizer.piece(tokenizer.pad_id)
    ends = {"eos_token_id": chat.stop_id, "pad_token_id": tokenizer.pad_id}
    files = {
        CONFIG: config_json(model.cfg, model.vocab_size) | ends,
        "generation_config.json": ends | {"do_sample": True},
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "bos_token": None,
            "eos_token": end,
            "pad_token": pad,
            "unk_token": "<unk>",
            "chat_template": chat.template,
            "model_max_length": model.cfg.max_length,
        },
    }
    partial = directory / PARTIAL  # inside: the same file system and permissions as the target
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (partial / name).write_text(json.dumps(content, indent=1) + "\n")
        tokenizer.save(partial / TOKENIZER)
        safetensors.numpy.save_file(tensors(model), partial / WEIGHTS, metadata={"format": "pt"})
        (partial / WEIGHTS).chmod((partial / CONFIG).stat().st_mode & 0o777)  # safetensors makes it private
        (directory / CONFIG).unlink(missing_ok=True)
        for path in sorted(partial.iterdir(), key=lambda p: p.name == CONFIG):
            os.replace(path, directory / path.name)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"export: cannot write {directory}: {reason}; free space or choose another --out") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load(directory: str | Path) -> tuple[Transformer, SentencePieceTokenizer]:
    """Model and tokenizer of an exported checkpoint.

    Raises:
        ConfigError: a file is missing, damaged, or of an architecture that is not ours.
    """
    return load_model(directory), SentencePieceTokenizer.load(Path(directory) / TOKENIZER)


def load_model(directory: str | Path) -> Transformer:
    """Model of a checkpoint directory; weights may be split over several safetensors files.

    Raises:
        ConfigError: a file is missing, damaged, or of an architecture that is not ours.
    """
    directory = Path(directory)
    try:
        settings = json.loads((directory / CONFIG).read_text())
    except OSError as error:
        raise ConfigError(f"import: cannot read {directory / CONFIG}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"import: {directory / CONFIG} is not JSON: {error}") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("vocab_size"), int):
        raise ConfigError(f"import: {directory / CONFIG} has no whole number `vocab_size`: copy it again")
    cfg = policy_config(settings)
    found: dict[str, jax.Array] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            found |= safetensors.flax.load_file(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"import: {path} is damaged ({error}): copy it again") from error
    model = nnx.eval_shape(lambda: Transformer(cfg, settings["vocab_size"], rngs=nnx.Rngs(0)))

    def tensor(name: str) -> jax.Array:
        if name not in found:
            raise ConfigError(f"import: {directory} holds no tensor {name!r}: is a weight file missing?")
        return jnp.asarray(found[name], jnp.float32)

    def value(ours: str, shape: tuple[int, ...]) -> jax.Array:
        if ours == "embedding":
            array = tensor("model.embed_tokens.weight")
        elif ours == "final_norm":
            array = tensor("model.norm.weight")
        elif ours == "head":
            array = tensor("lm_head.weight").T
        else:
            names = [f"model.layers.{i}.{_LAYER_NAMES[ours]}.weight" for i in range(cfg.layers)]
            array = jnp.stack([tensor(name).T for name in names])
        if array.shape != shape:
            raise ConfigError(f"import: {directory}: {ours} is {array.shape} on disk, config.json says {shape}")
        return array

    state = nnx.state(model, nnx.Param)
    for path, param in nnx.to_flat_state(state):
        param.set_value(value(path[-1], param.get_value().shape))
    nnx.update(model, state)
    return model


def tensors(model: Transformer) -> dict[str, np.ndarray]:
    """Weights under the names and in the orientation that the Hugging Face classes use, float32."""
    out = {"model.embed_tokens.weight": model.embedding[...], "model.norm.weight": model.final_norm[...]}
    if not model.cfg.tie_embeddings:
        out["lm_head.weight"] = model.head[...].T
    for ours, theirs in _LAYER_NAMES.items():
        if ours in ("query_norm", "key_norm") and not model.cfg.qk_norm:
            continue
        for i, weight in enumerate(getattr(model, ours)[...]):
            out[f"model.layers.{i}.{theirs}.weight"] = weight.T
    return {name: np.ascontiguousarray(np.asarray(array, np.float32)) for name, array in out.items()}


def config_json(cfg: PolicyConfig, vocab_size: int) -> dict:
    """The config.json of our architecture; `dtype` is the compute type (stored weights are float32)."""
    kind = "qwen3" if cfg.qk_norm else "llama"
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": vocab_size,
        "hidden_size": cfg.width,
        "intermediate_size": cfg.mlp_width,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "max_position_embeddings": cfg.max_length,
        "tie_word_embeddings": cfg.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "dtype": cfg.dtype,
    }


def policy_config(settings: dict) -> PolicyConfig:
    """Sizes from a config.json; rope settings may be at the top level or under `rope_parameters`.

    Raises:
        ConfigError: another architecture, or a variant of ours that changes the computation.
    """
    kind = settings.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ConfigError(f"import: model_type {kind!r} is not supported: use one of {', '.join(_ARCHITECTURES)}")
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    refused = {
        "attention_bias": settings.get("attention_bias"),
        "mlp_bias": settings.get("mlp_bias"),
        "use_sliding_window": settings.get("use_sliding_window"),
        "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        "hidden_act": settings.get("hidden_act", "silu") != "silu",
    }
    for name, bad in refused.items():
        if bad:
            raise ConfigError(f"import: {name} {settings.get(name)!r} of config.json is not supported")
    dtype = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    try:
        heads = settings["num_attention_heads"]
        return PolicyConfig(
            layers=settings["num_hidden_layers"],
            width=settings["hidden_size"],
            heads=heads,
            kv_heads=settings.get("num_key_value_heads", heads),
            head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
            mlp_width=settings["intermediate_size"],
            rope_theta=float(rope.get("rope_theta", settings.get("rope_theta", 10000.0))),
            norm_eps=settings.get("rms_norm_eps", 1e-6),
            qk_norm=kind == "qwen3",
            tie_embeddings=settings.get("tie_word_embeddings", False),
            max_length=settings["max_position_embeddings"],
            dtype="bfloat16" if dtype == "float16" else dtype,
        )
    except KeyError as error:
        raise ConfigError(f"import: config.json lacks {error}") from error
