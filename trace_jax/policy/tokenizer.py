"""Tokenizers. A policy trained from scratch uses a sentencepiece model trained on transcripts.

Text goes in and comes out unchanged: no normalisation, no added or removed spaces, bytes for characters the model never
saw. Control tokens (turn boundaries) have ids that no text encodes to, whatever it spells.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece

from trace_jax.config import ConfigError, TokenizerConfig
from trace_jax.policy import fragments

_SPACE = "\u2581"  # sentencepiece writes a space this way
_BYTES = 256


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; never a control id."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control ids add nothing."""
        ...

    def control_id(self, name: str) -> int:
        """Id of a control token."""
        ...

    def is_control(self, token: int) -> bool:
        """Whether an id is a control token (padding included)."""
        ...


class SentencePieceTokenizer:
    """A byte-pair model with byte fallback; long frequent fragments and identifiers are single pieces."""

    def __init__(self, model: bytes):
        """Args:
        model: the bytes of a sentencepiece `.model` file.

        Raises:
            ConfigError: they are not one, or a damaged one.
        """
        try:
            self._open(model)
        except Exception as error:  # damaged bytes surface as RuntimeError, IndexError, UnicodeDecodeError, ...
            raise ConfigError("tokenizer: not a sentencepiece model, or a damaged one: use an intact copy") from error

    def _open(self, model: bytes) -> None:
        if not model:
            raise ValueError("empty")  # sentencepiece takes it for "load later"
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        size = self._processor.vocab_size()
        self._pieces = [self._processor.id_to_piece(i) for i in range(size)]
        self._control = [self._processor.is_control(i) or self._processor.is_unknown(i) for i in range(size)]
        self._bytes = [self._spelling(i) for i in range(size)]
        self._space_bytes = [self._processor.piece_to_id(f"<0x{b:02X}>") for b in _SPACE.encode()]
        if self._processor.pad_id() < 0 or not all(map(self._processor.is_byte, self._space_bytes)):
            raise ValueError("no padding or byte pieces")

    @classmethod
    def train(
        cls, texts: Sequence[str], cfg: TokenizerConfig, control: Sequence[str], atoms: Sequence[str] = ()
    ) -> SentencePieceTokenizer:
        """Trains on messages; the result is a function of the arguments alone.

        Args:
            texts: plain messages, one text each, as they will be encoded (no control tokens).
            cfg: sizes. A corpus too small for `vocab_size` yields fewer pieces.
            control: names of the control tokens.
            atoms: words kept as single pieces outside every fragment, beside the ALL_CAPS identifiers of the corpus.

        Raises:
            ConfigError: `vocab_size` cannot hold the pieces that are always there.
        """
        texts = [text for text in texts if text]
        if not texts:
            raise ConfigError("tokenizer: no transcripts to train on: raise tokenizer.transcripts")
        minimum = max(3, len(texts) // 1000)
        alphabet = sorted(set("".join(texts)) - {" ", "\0", _SPACE, "\n"})
        fixed = _BYTES + 2 + len(control) + len(alphabet) + 2  # + padding, unknown; + space, line break
        room = cfg.vocab_size - fixed
        if room < 0:
            raise ConfigError(
                f"tokenizer.vocab_size {cfg.vocab_size} is too small: bytes, control tokens and the "
                f"{len(alphabet)} characters of the transcripts need {fixed}"
            )
        words = list(dict.fromkeys([*atoms, *fragments.identifiers(texts, minimum)]))[: room // 2]
        mined = fragments.mine(
            texts,
            limit=min(cfg.fragments, room - len(words)),
            min_characters=cfg.min_fragment_characters,
            minimum=minimum,
            atoms=atoms,
        )
        reserved = (*control, "<pad>", "<unk>")
        symbols = ["\n", *(s for s in (*words, *mined) if not any(name in s for name in reserved))]
        symbols = [s.replace(" ", _SPACE) for s in symbols]
        return cls(_train(texts, cfg.vocab_size, list(control), symbols, "".join(alphabet)))

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._pieces)

    @property
    def pieces(self) -> list[str]:
        """The pieces as the model file spells them, by id."""
        return list(self._pieces)

    @property
    def kinds(self) -> list[str]:
        """Of each id: "control" (padding and unknown too), "user" (fragments, identifiers), "byte" or "normal"."""
        byte = [self._processor.is_byte(i) for i in range(self.vocab_size)]
        first = byte.index(True)  # the trainer puts symbols given to it before the bytes, and learned pieces after

        def kind(token: int) -> str:
            if self._control[token]:
                return "control"
            return "byte" if byte[token] else "user" if token < first else "normal"

        return [kind(token) for token in range(self.vocab_size)]

    @property
    def scores(self) -> list[float]:
        """Merge priority of each id, higher first."""
        return [self._processor.get_score(i) for i in range(self.vocab_size)]

    @property
    def pad_id(self) -> int:
        """Id that fills unused places; masks come from lengths, never from this id."""
        return self._processor.pad_id()

    @property
    def hash(self) -> str:
        """SHA-256 of the model file."""
        return hashlib.sha256(self.model).hexdigest()

    def _spelling(self, token: int) -> bytes:
        if self._control[token]:
            return b""
        piece = self._pieces[token]
        if self._processor.is_byte(token):
            return bytes([int(piece[1:-1], 16)])
        return piece.replace(_SPACE, " ").encode()

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Lone surrogates, which no UTF-8 text can hold, become question marks."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        if _SPACE not in text:
            return self._processor.encode(text)
        # The model's own escape of a space, met in a text, is spelled in bytes: it would come back as a space.
        ids: list[int] = []
        for i, part in enumerate(text.split(_SPACE)):
            ids += (self._space_bytes if i else []) + self._processor.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control ids add nothing, bytes that are no UTF-8 become U+FFFD."""
        return b"".join([self._bytes[int(i)] for i in ids]).decode("utf-8", "replace")

    def control_id(self, name: str) -> int:
        """Id of a control token.

        Raises:
            ConfigError: the model has no such control token.
        """
        token = self._processor.piece_to_id(name)
        if not self._processor.is_control(token):
            raise ConfigError(f"tokenizer: no control token {name!r} in the model: train it with this chat format")
        return token

    def is_control(self, token: int) -> bool:
        """Whether an id is a control token (padding included)."""
        return self._control[int(token)]

    def piece(self, token: int) -> str:
        """The piece as text, a control token by its name; for people to look at."""
        return self._pieces[int(token)].replace(_SPACE, " ")

    def save(self, path: str | Path) -> None:
        """Writes the `.model` file."""
        Path(path).write_bytes(self.model)

    @classmethod
    def load(cls, path: str | Path) -> SentencePieceTokenizer:
        """Reads a `.model` file.

        Raises:
            ConfigError: missing, or not a sentencepiece model.
        """
        try:
            return cls(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"tokenizer: cannot read {path}: {error.strerror}; copy it again") from error
        except ConfigError as error:
            raise ConfigError(
                f"tokenizer: {path} is not a sentencepiece model, or a damaged one: copy it again"
            ) from error


def _train(texts: list[str], vocab_size: int, control: list[str], symbols: list[str], alphabet: str) -> bytes:
    def attempt(size: int) -> bytes:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            split_digits=True,
            split_by_whitespace=False,
            split_by_unicode_script=False,
            byte_fallback=True,
            required_chars=alphabet
            + _SPACE,  # without its own piece a space would be spelled in the bytes of its escape
            character_coverage=1.0,
            control_symbols=control,
            user_defined_symbols=symbols,
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            max_sentence_length=1 << 24,
            num_threads=1,
            minloglevel=2,
        )
        return model.getvalue()

    try:
        return attempt(vocab_size)
    except RuntimeError as error:
        # A small corpus runs out of pairs to merge; the trainer says how many pieces it can make.
        limit = re.search(r"<= (\d+)", str(error))
        if limit is None:
            raise
        return attempt(int(limit.group(1)))
