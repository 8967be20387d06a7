"""The user's values in the agent's vocabulary, which is closed: a word of it for every value.

A value gets, in this order, the word that the mapping file declares, the word that means the same (`synonyms.VALUES`),
or a free word of its dimension that stands for it and nothing else. Where values outnumber words, the smallest share
one: they are looked at together. Nothing is lost and nothing is hidden: what stands for what is told, and answers name
the user's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trace_jax.diagnose import synonyms
from trace_jax.simulator.vocabulary import ATTRIBUTES

# Words that say least about who or what they stand for come first.
_FREE = {"audience": ("LOYAL", "RETARGETING", "PROSPECTING")}


@dataclass(frozen=True)
class Words:
    """One dimension.

    Attributes:
        of: value as spelled -> word. how: value -> "declared", "same meaning", "stands for it" or "together".
        order: values by impressions, most first.
    """

    dimension: str
    of: Mapping[str, str]
    how: Mapping[str, str]
    order: tuple[str, ...]

    def values(self, word: str) -> tuple[str, ...]:
        """The user's values behind a word, most impressions first."""
        return tuple(v for v in self.order if self.of[v] == word)

    def name(self, word: str) -> str:
        """A word in the user's terms."""
        found = self.values(word)
        groups: dict[str, str] = {}
        for value in found:  # spellings of the same value count once
            groups.setdefault(synonyms.spelling(value), value)
        shown = list(groups.values())
        if len(shown) <= 3:
            return " / ".join(shown) or word
        return f"{shown[0]} / {shown[1]} / {len(shown) - 2} more"

    def lines(self) -> list[tuple[str, str, str]]:
        """(word, values behind it, how) for people."""
        out = []
        for word in ATTRIBUTES[self.dimension]:
            found = self.values(word)
            if found:
                hows = dict.fromkeys(self.how[v] for v in found)
                shown = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
                out.append((word, shown, ", ".join(hows)))
        return out


def assign(dimension: str, impressions: Mapping[str, float], declared: Mapping[str, str]) -> Words:
    """Words of a dimension's values.

    Args:
        impressions: of each value as spelled.
        declared: value -> word, as the user said.
    """
    order = tuple(sorted(impressions, key=lambda v: (-impressions[v], v)))
    said = {synonyms.spelling(v): w for v, w in declared.items()}
    of: dict[str, str] = {}
    how: dict[str, str] = {}
    unknown: dict[str, list[str]] = {}
    for value in order:
        key = synonyms.spelling(value)
        word = said.get(key) or synonyms.word_of(dimension, value)
        if word is None:
            unknown.setdefault(key, []).append(value)  # spellings that differ in case or blanks are one value
            continue
        of[value], how[value] = word, "declared" if key in said else "same meaning"
    free = [w for w in _FREE.get(dimension, ATTRIBUTES[dimension]) if w not in of.values()]
    groups = list(unknown.values())
    for number, spellings in enumerate(groups):
        own = number < len(free) - (len(groups) > len(free))
        word = free[number] if own else (free[-1] if free else _smallest(of, impressions))
        for value in spellings:
            of[value], how[value] = word, "stands for it" if own else "together"
    return Words(dimension, of, how, order)


def _smallest(of: Mapping[str, str], impressions: Mapping[str, float]) -> str:
    """The word with the fewest impressions, where none is free: values without one join it."""
    sums: dict[str, float] = {}
    for value, word in of.items():
        sums[word] = sums.get(word, 0.0) + impressions[value]
    return min(sums, key=lambda w: (sums[w], w))


def shared(words: Sequence[Words]) -> list[str]:
    """Values that are looked at only together, in words."""
    out = []
    for w in words:
        for word in ATTRIBUTES[w.dimension]:
            found = w.values(word)
            if len({synonyms.spelling(v) for v in found}) > 1 and any(w.how[v] == "together" for v in found):
                out.append(
                    f"{w.dimension}: {', '.join(found[:6])}{' ...' * (len(found) > 6)} are looked at together only"
                )
    return out
