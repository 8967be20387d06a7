"""tokenizer.json and tokenizer_config.json from the metadata of a GGUF file with a byte-level BPE.

Token types of GGUF: 1 learned, 2 unknown, 3 control, 4 added by the user (the tool tags of Qwen), 5 unused, 6 byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError
from trace_jax.policy.fast_tokenizer import SETTINGS, TEMPLATE, TOKENIZER

_PREFIX = "tokenizer.ggml."
_LEARNED, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{word}+|\p{{N}}| ?[^\s{kinds}\p{{N}}]+[\r\n]*"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _pattern(word: str, kinds: str) -> dict[str, Any]:
    regex = _LETTERS.format(word=word, kinds=kinds) + _SPACES
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return _sequence(split, _level(False))


_DIGITS = {"type": "Digits", "individual_digits": True}
_NFC = {"type": "NFC"}
# How text is cut before pieces are merged (`tokenizer.ggml.pre`), and its normalisation. "default" is what files say
# whose maker did not know; GPT-2's pattern is the one of byte-level BPE.
_SPLITS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "smollm": (_sequence(_DIGITS, _level(True)), None),
    "gpt-2": (_level(True), None),
    "default": (_level(True), None),
    "qwen2": (_pattern(r"\p{L}", r"\p{L}"), _NFC),
    "qwen35": (_pattern(r"[\p{L}\p{M}]", r"\p{L}\p{M}"), _NFC),
}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Files of a directory that `FastTokenizer` reads; the chat template is one of them if the file has one.

    Args:
        metadata: the file's keys with plain values (see `read_metadata`).

    Raises:
        ConfigError: another kind of tokenizer, or entries that are missing or do not fit together.
    """
    kind, pre = metadata.get(f"{_PREFIX}model"), metadata.get(f"{_PREFIX}pre", "default")
    if kind != "gpt2":
        raise ConfigError(f"GGUF: tokenizer.ggml.model is {kind!r}: only byte-level BPE (gpt2) is read")
    if pre not in _SPLITS:
        raise ConfigError(f"GGUF: tokenizer.ggml.pre {pre!r} is unknown: use a file with {', '.join(_SPLITS)}")
    tokens = _entry(metadata, "tokens")
    merges = [merge.split(" ", 1) for merge in _entry(metadata, "merges")]
    types = [int(t) for t in metadata.get(f"{_PREFIX}token_type", [_LEARNED] * len(tokens))]
    if len(types) != len(tokens) or not all(len(pair) == 2 for pair in merges):
        raise ConfigError("GGUF: tokens, their types and merges do not fit together: copy the file again")
    added = [
        {"id": i, "content": name, "special": kind != _USER}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, (name, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (2, _CONTROL, _USER)
    ]
    # Control tokens too: readers give an added token that the vocabulary lacks the next free id, not the one it names.
    vocabulary = {name: i for i, (name, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    split, normalizer = _SPLITS[pre]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": _level(True),
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocabulary, "merges": merges},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for key, ours in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        token = metadata.get(f"{_PREFIX}{key}_token_id")
        if token is not None:
            if not 0 <= int(token) < len(tokens):
                raise ConfigError(f"GGUF: tokenizer.ggml.{key}_token_id {token} is no token: copy the file again")
            settings[ours] = tokens[int(token)]
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    settings |= {"model_max_length": int(length)} if length else {}
    files = {TOKENIZER: content, SETTINGS: settings}
    written = {name: json.dumps(data, ensure_ascii=False).encode() for name, data in files.items()}
    template = metadata.get("tokenizer.chat_template")
    return written | ({TEMPLATE: template.encode()} if template else {})


def _entry(metadata: Mapping[str, Any], name: str) -> Sequence[str]:
    value = metadata.get(f"{_PREFIX}{name}")
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"GGUF: {_PREFIX}{name} is missing or no list of texts: use a file that holds its tokenizer")
    return value


def metadata_of(reader: Any) -> dict[str, Any]:
    """Keys and plain values that a `gguf.GGUFReader` found."""
    return {name: field.contents() for name, field in reader.fields.items()}


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Keys and plain values of a GGUF file's header.

    Raises:
        ConfigError: the file is missing, cut off or no GGUF, or the package `gguf` is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("GGUF: reading it needs the package `gguf`: pip install 'trace-jax[hf]'") from error
    try:
        return metadata_of(gguf.GGUFReader(str(path)))
    except OSError as error:
        raise ConfigError(f"GGUF: cannot read {path}: {error.strerror or error}; copy it again") from error
    except Exception as error:  # cut-off files surface as ValueError, IndexError, ...
        raise ConfigError(f"GGUF: {path} is no GGUF file, or a damaged one: copy it again") from error
