"""Byte-level BPE from a `tokenizer.json`, the format of Qwen and SmolLM2 (package `tokenizers`, extra `hf`).

Every added token (`<|im_end|>`, `<think>`, `<tool_call>`, ...) is a control token here: plain text never becomes one,
whatever it spells. Two tokenizers would be needed for a text that mixes both; `TemplateChat` cuts it instead.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
FILES = (TOKENIZER, SETTINGS, TEMPLATE, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def byte_alphabet() -> dict[int, str]:
    """How byte-level BPE (GPT-2) writes each byte as a printable character."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


_BYTES = {character: byte for byte, character in byte_alphabet().items()}


class FastTokenizer:
    """A byte-level BPE tokenizer. Thread-safe: it has no state."""

    def __init__(self, files: Mapping[str, bytes]):
        """Args:
        files: by name, those of `FILES` that there are; at least tokenizer.json. They are kept as they are.

        Raises:
            ConfigError: a file is missing, damaged or of another kind of tokenizer, or `tokenizers` is not installed.
        """
        self.files = dict(files)
        content = _json(self.files, TOKENIZER)
        self.settings = _json(self.files, SETTINGS) if SETTINGS in self.files else {}
        try:
            self._read(content)
        except ConfigError:
            raise
        except Exception as error:  # damaged files surface as KeyError, TypeError, the reader's own Exception, ...
            raise ConfigError(f"tokenizer: {TOKENIZER} is damaged or of an unknown form: copy it again") from error

    def _read(self, content: dict[str, Any]) -> None:
        model = content["model"]
        if model.get("type", "BPE") != "BPE" or not _byte_level(content.get("pre_tokenizer")):
            raise ConfigError(f"tokenizer: {TOKENIZER} is no byte-level BPE, the only kind read: use such a model")
        vocabulary: dict[str, int] = model["vocab"]
        added = {str(token["content"]): int(token["id"]) for token in content.get("added_tokens") or ()}
        self._flags = {str(token["content"]): token for token in content.get("added_tokens") or ()}
        for token, entry in (self.settings.get("added_tokens_decoder") or {}).items():
            if added.setdefault(entry["content"], int(token)) != int(token):
                raise ConfigError(
                    f"tokenizer: {TOKENIZER} and {SETTINGS} disagree on the id of {entry['content']!r}: copy them again"
                )
            self._flags.setdefault(entry["content"], entry)
        named = [*self.special.values(), *_names(self.settings.get("additional_special_tokens"))]
        added |= {name: vocabulary[name] for name in named if name in vocabulary}
        plain = [name for name in added if not name.strip()]
        if plain:
            raise ConfigError(
                f"tokenizer: {TOKENIZER} has the added token {plain[0]!r}, which is plain text: not supported"
            )
        names: dict[int, str] = {}
        for name, token in [*vocabulary.items(), *added.items()]:
            if names.setdefault(token, name) != name or vocabulary.get(name, token) != token:
                raise ConfigError(
                    f"tokenizer: in {TOKENIZER} {name!r} shares the id {token}, or has another one, too: copy it again"
                )
        self._control = added
        self._control_names = {token: name for name, token in added.items()}
        self._pieces = {token: name for name, token in vocabulary.items() if name not in added}
        self._spelling = {token: _spell(name) for token, name in self._pieces.items()}
        self.vocab_size = 1 + max(self._pieces.keys() | self._control_names.keys())
        self._text = _tokenizers().Tokenizer.from_str(json.dumps(_without(content, added)))
        absent = [byte for character, byte in _BYTES.items() if character not in vocabulary]
        # Trained on text, some vocabularies lack bytes that UTF-8 needs: what they cannot write becomes U+FFFD.
        self._absent = frozenset(absent)
        if set("?\ufffd".encode()) & self._absent or len(absent) > 64:
            raise ConfigError(f"tokenizer: {TOKENIZER} lacks {len(absent)} of the 256 bytes: copy it again")

    @cached_property
    def special(self) -> dict[str, str]:
        """Names of the special tokens that tokenizer_config.json sets: `eos_token`, `pad_token`, ..."""
        found = {key: next(iter(_names(self.settings.get(key))), None) for key in _SPECIAL}
        return {key: name for key, name in found.items() if name}

    @property
    def template(self) -> str | None:
        """The chat template; of several in tokenizer_config.json the one for tools, else the default. None: there is
        none.

        Raises:
            ConfigError: it is no text.
        """
        if TEMPLATE in self.files:
            try:
                return self.files[TEMPLATE].decode()
            except UnicodeDecodeError as error:
                raise ConfigError(f"chat template: {TEMPLATE} is not UTF-8 text: copy it again") from error
        found = self.settings.get("chat_template")
        if isinstance(found, list):
            named = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("tool_use", named.get("default"))
        return found if isinstance(found, str) else None

    @property
    def pad_id(self) -> int:
        """Id that fills unused places, which may be a token with another use; masks come from lengths."""
        for key in ("pad_token", "eos_token"):
            if self.special.get(key) in self._control:
                return self._control[self.special[key]]
        return next(iter(self._control.values()), 0)

    @property
    def hash(self) -> str:
        """SHA-256 of tokenizer.json."""
        return hashlib.sha256(self.files[TOKENIZER]).hexdigest()

    @property
    def control_tokens(self) -> dict[str, int]:
        """Ids of the control tokens by name."""
        return dict(self._control)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, never a control id. Lone surrogates become question marks; the tokenizer's own
        normalisation applies (Qwen: NFC)."""
        data = text.encode("utf-8", "replace")
        if self._absent and not self._absent.isdisjoint(data):
            keep = (c if self._absent.isdisjoint(c.encode()) else "\ufffd" for c in data.decode())
            data = "".join(keep).encode()
        return self._text.encode(data.decode(), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control ids and ids that the tokenizer does not know add nothing, bytes that are no UTF-8 become
        U+FFFD."""
        return b"".join([self._spelling.get(int(i), b"") for i in ids]).decode("utf-8", "replace")

    def spell(self, ids: Sequence[int]) -> tuple[str, list[tuple[int, int, str]]]:
        """Text of ids with the control tokens written out, and where these are: (start, end, name)."""
        text, run, marks = "", [], []
        for i in map(int, ids):
            if i in self._spelling:
                run.append(i)
                continue
            text, run = text + self.decode(run), []
            name = self.piece(i)
            marks.append((len(text), len(text) + len(name), name))
            text += name
        return text + self.decode(run), marks

    def control_id(self, name: str) -> int:
        """Id of a control token.

        Raises:
            ConfigError: there is no such control token.
        """
        if name not in self._control:
            raise ConfigError(f"tokenizer: no control token {name!r} in {TOKENIZER}: use the files of one model")
        return self._control[name]

    def is_control(self, token: int) -> bool:
        """Whether no text encodes to an id: a control token, or a row of the model that has no token."""
        return int(token) not in self._spelling

    def takes_neighbours(self, name: str) -> bool:
        """Whether a control token swallows spaces beside it, or is one only between spaces."""
        return any(self._flags.get(name, {}).get(flag) for flag in ("lstrip", "rstrip", "single_word"))

    def piece(self, token: int) -> str:
        """A token as text, a control token by its name; for people to look at."""
        token = int(token)
        if token in self._spelling:
            return self._spelling[token].decode("utf-8", "replace")
        return self._control_names.get(token, f"<unused {token}>")

    def save(self, directory: str | Path) -> None:
        """Writes the files as they were read."""
        for name, data in self.files.items():
            (Path(directory) / name).write_bytes(data)

    @classmethod
    def load(cls, directory: str | Path) -> FastTokenizer:
        """Reads the files of a directory.

        Raises:
            ConfigError: see `__init__`; the message names the directory.
        """
        directory = Path(directory)
        try:
            files = {name: (directory / name).read_bytes() for name in FILES if (directory / name).is_file()}
        except OSError as error:
            raise ConfigError(f"tokenizer: cannot read {error.filename}: {error.strerror}; copy it again") from error
        try:
            return cls(files)
        except ConfigError as error:
            raise ConfigError(f"{error} ({directory})") from error


def _tokenizers():
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            f"tokenizer: reading {TOKENIZER} needs the package `tokenizers`: pip install 'trace-jax[hf]'"
        ) from error
    return tokenizers


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        raise ConfigError(f"tokenizer: no {name}: copy it beside the weights")
    try:
        content = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"tokenizer: {name} is not JSON, or cut off: copy it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"tokenizer: {name} is not a JSON object: copy it again")
    return content


def _names(value: Any) -> list[str]:
    """Of a special token, written as a string, an object with `content`, or a list of these."""
    if isinstance(value, list):
        return [name for entry in value for name in _names(entry)]
    if isinstance(value, dict):
        value = value.get("content")
    return [value] if isinstance(value, str) and value else []


def _byte_level(pre_tokenizer: Any) -> bool:
    if not isinstance(pre_tokenizer, dict):
        return False
    parts = pre_tokenizer.get("pretokenizers") or ()
    return pre_tokenizer.get("type") == "ByteLevel" or any(map(_byte_level, parts))


def _spell(piece: str) -> bytes:
    if all(c in _BYTES for c in piece):
        return bytes([_BYTES[c] for c in piece])
    return piece.encode("utf-8", "replace")


def _without(content: dict[str, Any], control: Mapping[str, int]) -> dict[str, Any]:
    """The tokenizer of plain text: it has no control tokens, so no text can spell one. Some vocabularies list them
    beside the learned pieces too."""
    content = copy.copy(content)
    content |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    model = content["model"]
    pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    kept = [pair for pair in pairs if not control.keys() & {*pair, "".join(pair)}]
    content["model"] = model | {
        "vocab": {name: token for name, token in model["vocab"].items() if name not in control},
        "merges": kept,
        "dropout": None,  # of merges, at random: for training tokenizers
        "unk_token": None if model.get("unk_token") in control else model.get("unk_token"),
    }
    return content
