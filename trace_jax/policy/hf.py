"""Hugging Face checkpoints: what the rest of the package uses of them.

hf_config  config.json <-> PolicyConfig       hf_names  which tensor holds which parameter, and how
hf_files   safetensors files, one tensor at a time
hf_read    tensors -> sharded arrays          hf_write  policies -> checkpoints      hf_peft  adapters -> PEFT
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flax import nnx

from trace_jax.config import ConfigError
from trace_jax.policy.hf_config import config_json, policy_config
from trace_jax.policy.hf_files import INDEX, WEIGHTS, SafetensorFiles
from trace_jax.policy.hf_read import Origin, read, resolve
from trace_jax.policy.hf_write import CONFIG, GENERATION, PARTIAL, TOKENIZER, export, tensors
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.policy.transformer import Transformer

__all__ = [
    "CONFIG",
    "GENERATION",
    "INDEX",
    "PARTIAL",
    "TOKENIZER",
    "WEIGHTS",
    "Origin",
    "config_json",
    "export",
    "load",
    "load_model",
    "policy_config",
    "read_settings",
    "tensors",
]


def load(directory: str | Path) -> tuple[Transformer, SentencePieceTokenizer]:
    """Model and tokenizer of an exported checkpoint of a policy from scratch.

    Raises:
        ConfigError: a file is missing, damaged, or of an architecture that is not ours.
    """
    return load_model(directory), SentencePieceTokenizer.load(Path(directory) / TOKENIZER)


def load_model(directory: str | Path) -> Transformer:
    """Model of a checkpoint directory, in float32 on one device.

    Raises:
        ConfigError: a file is missing, damaged, or of an architecture that is not ours.
    """
    settings = read_settings(directory)
    cfg = policy_config(settings)
    source = SafetensorFiles(Path(directory))
    found = resolve(source, cfg, cfg.vocab_size)
    model = nnx.eval_shape(lambda: Transformer(cfg, cfg.vocab_size, rngs=nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, read(source, found, cfg, cfg.vocab_size))
    nnx.update(model, state)
    return model


def read_settings(directory: str | Path) -> dict[str, Any]:
    """The config.json of a checkpoint directory.

    Raises:
        ConfigError: it is missing, damaged, or has no size of the vocabulary.
    """
    path = Path(directory) / CONFIG
    try:
        settings = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"import: cannot read {path}: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"import: {path} is nested too deeply: copy it again") from error
    except ValueError as error:
        raise ConfigError(f"import: {path} is not JSON, or cut off ({error}): copy it again") from error
    text = settings.get("text_config", settings) if isinstance(settings, dict) else None
    if not isinstance(text, dict) or not isinstance(text.get("vocab_size"), int):
        raise ConfigError(f"import: {path} has no whole number `vocab_size`: copy it again")
    return settings
