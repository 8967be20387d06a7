"""An answer as a person types it, made into the text that an agent would have given."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trace_jax.config_io import nearest
from trace_jax.environments.ads.answer import (
    MAX_DRIVER_PAIRS,
    Pair,
    format_answer,
    normalise_cause,
    normalise_pair,
    parse_lenient,
)
from trace_jax.simulator.causes import CAUSE_NAMES, SEGMENT_CAUSES
from trace_jax.simulator.vocabulary import ATTRIBUTES


class Unclear(ValueError):
    """What was typed names nothing that could be graded: one line with what was probably meant."""


def answer_text(typed: str) -> str:
    """The answer of `CAUSE [dimension=value ...]`, or JSON as it is.

    Raises:
        Unclear: an unknown name, a slice where the cause has none, or JSON without a cause.
    """
    if typed.startswith("{"):
        if parse_lenient(typed) is None:
            raise Unclear('no cause in this JSON: {"decision": {"root_cause": CAUSE, "driver_segments": [...]}}')
        return typed
    words = re.sub(r"\s*([=:])\s*", r"\1", typed).split()
    if re.search("[=:]", words[0]):
        raise Unclear(f"the cause comes first: .answer CAUSE {words[0]}")
    # Both "creative fatigue" and CREATIVE_FATIGUE, whole or begun.
    count = next((n for n in (3, 2) if len(words) >= n and _begun(" ".join(words[:n]))), 1)
    cause = cause_of(" ".join(words[:count]))
    rest = words[count:]
    if rest and rest[0].lower() == "in":  # as the grade says it
        del rest[0]
    try:
        pairs = slice_of(" ".join(rest))
    except Unclear as unclear:
        raise Unclear(f"I read the cause as {cause}; {unclear}") from None
    if pairs and cause not in SEGMENT_CAUSES:
        raise Unclear(f"an answer of {cause} names no slice: .answer {cause}")
    return format_answer(cause, pairs)


def cause_of(typed: str) -> str:
    """A cause by its name, its beginning, or its number in `CAUSE_NAMES` from 1.

    Raises:
        Unclear: there is none, or several begin like this.
    """
    typed = typed.strip()
    if typed.isdecimal() and 1 <= int(typed[:4]) <= len(CAUSE_NAMES):
        return CAUSE_NAMES[int(typed) - 1]
    begun = _begun(typed)
    if len(begun) == 1:
        return begun[0]
    upper = re.sub(r"[\s-]+", "_", typed).upper()
    meant = nearest(upper, CAUSE_NAMES)
    raise Unclear(f"no cause {typed}: " + _mend(begun, meant, ".causes lists them"))


def _begun(typed: str) -> list[str]:
    """The causes whose name begins like this; the one that it names."""
    if (found := normalise_cause(typed)) is not None:
        return [found]
    upper = re.sub(r"[\s-]+", "_", typed.strip()).upper()
    return [name for name in CAUSE_NAMES if name.startswith(upper)]


def slice_of(typed: str) -> list[Pair]:
    """The pairs of `dimension=value ...`; a value alone will do, as no two dimensions share one.

    Raises:
        Unclear: an unknown dimension or value, or more than a slice can have.
    """
    typed = re.sub(r"\s*([=:])\s*", r"\1", typed)
    words = [w for w in re.split(r"[\s,;&]+", typed) if w and w.lower() != "and"]
    pairs = sorted(set(map(pair_of, words)))
    if len(pairs) > MAX_DRIVER_PAIRS or len({a for a, _ in pairs}) < len(pairs):
        raise Unclear("a slice fixes one dimension, or two different ones")
    return pairs


def pair_of(typed: str) -> Pair:
    """One `dimension=value`, or the value alone."""
    dimension, given, value = typed.replace(":", "=").partition("=")
    if not given:
        for name in ATTRIBUTES:
            if (pair := normalise_pair(name, typed)) is not None:
                return pair
        every = [v for values in ATTRIBUTES.values() for v in values]
        raise Unclear(
            f"'{typed}' is no value of a segment: " + _mend([], nearest(typed.upper(), every), ".slices lists them")
        )
    if (pair := normalise_pair(dimension, value)) is not None:
        return pair
    name = next((a for a in ATTRIBUTES if normalise_pair(dimension, ATTRIBUTES[a][0])), None)
    if name is None:
        meant = nearest(dimension.lower(), ATTRIBUTES)
        raise Unclear(f"no dimension {dimension}: " + _mend([], meant, f"one of {', '.join(ATTRIBUTES)}"))
    meant = nearest(value.upper(), ATTRIBUTES[name])
    raise Unclear(f"{name} has no value {value}: " + _mend([], meant, f"one of {', '.join(ATTRIBUTES[name])}"))


def _mend(several: Sequence[str], meant: str | None, otherwise: str) -> str:
    if several:
        return " or ".join(several) + "?"
    return f"did you mean {meant}?" if meant else otherwise


def spoken(cause: str | None, pairs: Sequence[Pair]) -> str:
    """A decision in words."""
    if cause is None:
        return "no answer that could be read"
    return cause + (" in " + " & ".join(f"{a}={v}" for a, v in pairs) if pairs else "")
