"""Golden tokenizers and conversations, see tests/parity/chat_goldens.py."""

import functools
import json
from pathlib import Path

from trace_jax.config import ChatConfig
from trace_jax.policy.fast_tokenizer import FastTokenizer
from trace_jax.policy.template_chat import TemplateChat

NAMES = ("qwen3", "qwen3_5", "smollm2")


@functools.cache
def golden(name: str) -> dict:
    """What `transformers` made of one template's conversations."""
    return json.loads((Path(__file__).parent / "golden" / f"chat_{name}.json").read_text())


@functools.cache
def tokenizer_of(name: str) -> FastTokenizer:
    """The golden's tokenizer, with its template."""
    return FastTokenizer({file: text.encode() for file, text in golden(name)["files"].items()})


@functools.cache
def chat_of(name: str, thinking: str = "off", tool_format: str = "auto") -> TemplateChat:
    """The turn format over it."""
    return TemplateChat(tokenizer_of(name), ChatConfig(thinking=thinking, tool_format=tool_format))
