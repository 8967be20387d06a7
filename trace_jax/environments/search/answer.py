"""Answers of the search task: a name, graded by exact match after normalisation.

    r = (1 - w) 1{name right} + w 1{the answer can be read},   w = `environment.reward_format`, 0.05 as in `ads.reward`

A right answer earns 1. An answer can be read when it is one short line; of several lines the last that begins with
"answer:" counts, which models that explain themselves may use.
"""

from __future__ import annotations

import re
import unicodedata

from trace_jax.environments.base import Reward

MAX_CHARACTERS = 20_000  # only the tail of a longer text is searched for an answer
MAX_ANSWER = 80  # characters of a name; longer lines are prose
_MARKED = re.compile(r"^\W*(?:final |exact )?answer\W*:(.*)$", re.IGNORECASE | re.MULTILINE)


def normalise(text: str) -> str:
    """Case, spaces and punctuation do not matter: words in lower case with one space between them."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+", folded.replace("_", " ")))


def parse(text: str) -> str | None:
    """The normalised answer of a text, None if there is none. Never raises on any text."""
    text = text[-MAX_CHARACTERS:].strip()
    marked = _MARKED.findall(text)
    line = marked[-1].strip() if marked else text
    if "\n" in line or len(line) > MAX_ANSWER:
        return None
    return normalise(line) or None


def grade(text: str, gold: str, hops: int, weight: float) -> Reward:
    """Grade an answer's text.

    Args:
        text: of the final turn, any text. gold: the right name. hops: of the question, for metrics.
        weight: of the format part, in [0, 1].

    Returns:
        Reward with parts right, format (unweighted, 0 or 1) and info: right, full_right (the same), parsed, hops.
    """
    found = parse(text)
    right, parsed = found is not None and found == normalise(gold), found is not None
    return Reward(
        total=(1 - weight) * right + weight * parsed,
        parts={"right": float(right), "format": float(parsed)},
        info={"right": right, "full_right": right, "parsed": parsed, "hops": hops},
    )
