"""Tokenizer and turn format of a directory: a run's, or a checkpoint's.

tokenizer.model                                  sentencepiece, `NanoChat` (policies from scratch)
tokenizer.json, tokenizer_config.json,           byte-level BPE, `TemplateChat` (imported policies)
chat_template.jinja
"""

from __future__ import annotations

from pathlib import Path

from trace_jax.config import ChatConfig, ConfigError
from trace_jax.policy.chat import NanoChat
from trace_jax.policy.fast_tokenizer import FILES, FastTokenizer
from trace_jax.policy.fast_tokenizer import TOKENIZER as FAST
from trace_jax.policy.template_chat import TemplateChat
from trace_jax.policy.tokenizer import SentencePieceTokenizer

SENTENCEPIECE = "tokenizer.model"


def tokenizer_files(directory: str | Path) -> tuple[str, ...]:
    """Names of the files there that say how text becomes tokens, the main one first; empty without a tokenizer."""
    directory = Path(directory)
    if (directory / SENTENCEPIECE).is_file():
        return (SENTENCEPIECE,)
    if not (directory / FAST).is_file():
        return ()
    return tuple(name for name in FILES if (directory / name).is_file())


def open_chat(directory: str | Path, cfg: ChatConfig) -> NanoChat | TemplateChat:
    """The turn format over the tokenizer of a directory.

    Args:
        cfg: for imported policies; those from scratch have one fixed form.

    Raises:
        ConfigError: there is no tokenizer, it is damaged, or its chat template cannot be used.
    """
    directory = Path(directory)
    names = tokenizer_files(directory)
    if not names:
        raise ConfigError(f"{directory} has no {SENTENCEPIECE} or {FAST}: copy the tokenizer there")
    if names[0] == SENTENCEPIECE:
        if cfg != ChatConfig():
            raise ConfigError(f"`chat` is for imported policies, that of {directory} has one form: leave it out")
        return NanoChat(SentencePieceTokenizer.load(directory / SENTENCEPIECE))
    tokenizer = FastTokenizer.load(directory)
    try:
        return TemplateChat(tokenizer, cfg)
    except ConfigError as error:
        raise ConfigError(f"{error} ({directory})") from error
