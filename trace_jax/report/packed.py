"""Data inside a page: JSON, compressed, as text that no parser of HTML can trip over."""

from __future__ import annotations

import base64
import gzip
import json
import math
from typing import Any


def pack(value: Any) -> str:
    """gzip of compact JSON, in base64: letters, digits, `+/=` and nothing else. The same value gives the same text.

    Raises:
        ValueError: a number is not finite (`finite` makes those null).
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Half a surrogate pair is no text: a browser would show a replacement character, too.
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode()


def unpack(text: str) -> Any:
    """The inverse of `pack`."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


def finite(x: float | None, digits: int = 5) -> float | None:
    """A number to so many significant digits; None if there is none, or it is not finite."""
    return None if x is None or not math.isfinite(x) else float(f"{x:.{digits}g}")


class Words:
    """Texts by number: each is kept once, however often it is used."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """Number of a text."""
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        """By number."""
        return list(self._numbers)
