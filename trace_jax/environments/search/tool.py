"""The tools of a search episode: `search`, `open` and `find` over one corpus (the tools of arXiv 2607.13988's setting).

An action is a text that holds exactly one call. It is parsed, never evaluated.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections import Counter
from collections.abc import Sequence

from trace_jax.config import SearchConfig
from trace_jax.environments.base import Observation
from trace_jax.environments.search.corpus import World, make_world
from trace_jax.environments.search.prompt import joined, result_line, sentences

MAX_ACTION = 2000  # characters of a call; nothing sensible is longer, and parsing takes memory
TITLE_WEIGHT = 3  # a word of the title counts as so many of the text
_K1, _B = 1.2, 0.75  # BM25's usual constants
_USAGE = 'write one call: search("text"), open(number) or find("text")'
_CALL = re.compile(r"\s*[A-Za-z_]\w*\s*\(.*\)\s*", re.DOTALL)


def words(text: str) -> list[str]:
    """The words of a text as the index sees them."""
    return re.findall(r"\w+", text.casefold())


class Library:
    """The documents of a world in one wording, and their index. Never changes; shared by threads."""

    def __init__(self, world: World, style: str):
        self.world, self.style = world, style
        self.sentences = {e.id: sentences(e, style) for e in world.entities}
        self.lines = {e.id: result_line(e, style) for e in world.entities}
        self._counts = {
            e.id: Counter(words(" ".join(self.sentences[e.id])) + words(e.name) * (TITLE_WEIGHT - 1))
            for e in world.entities
        }
        self._titles = {e.id: words(e.name) for e in world.entities}
        self._lengths = {number: counts.total() for number, counts in self._counts.items()}
        self._mean = sum(self._lengths.values()) / len(self._lengths)
        self._frequency = Counter(word for counts in self._counts.values() for word in counts)

    def search(self, text: str, limit: int) -> list[int]:
        """Numbers of the documents that share words with a text, at most `limit`.

        The document whose title is the text comes first, then all others by BM25 score; equals by number.
        """
        wanted = words(text)
        asked = set(wanted) & self._frequency.keys()
        scores = {number: self._score(number, asked) for number in self._counts}
        ranked = sorted((self._titles[n] != wanted, -score, n) for n, score in scores.items() if score > 0)
        return [number for *_, number in ranked[:limit]]

    def _score(self, number: int, asked: set[str]) -> float:
        counts, total = self._counts[number], 0.0
        norm = _K1 * (1 - _B + _B * self._lengths[number] / self._mean)
        for word in sorted(asked):  # one order of summation, whatever the hashes
            if n := counts.get(word, 0):
                rarity = math.log(1 + (len(self._counts) - self._frequency[word] + 0.5) / (self._frequency[word] + 0.5))
                total += rarity * n * (_K1 + 1) / (n + norm)
        return total


@functools.lru_cache(maxsize=256)
def library(sizes: SearchConfig, seed: int, index: int, style: str) -> Library:
    """The library of a world, kept for the other members of its group."""
    return Library(make_world(sizes, seed, index), style)


class _Refused(Exception):
    """What is wrong with a call, in the words that the agent reads."""


def parse_call(action: str) -> tuple[str, str | int]:
    """(tool, argument) of an action.

    Raises:
        _Refused: it is no such call.
    """
    if not action.strip():
        raise _Refused(f"empty call: {_USAGE}")
    if len(action) > MAX_ACTION:
        raise _Refused(f"the call is longer than {MAX_ACTION} characters: {_USAGE}")
    if "\\" in action:  # Python warns about some escapes, and no name needs one
        raise _Refused("backslashes are not understood: write the text as it is")
    if not _CALL.fullmatch(action):
        raise _Refused(f"not a call: {_USAGE}")
    try:
        call = ast.parse(action.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _Refused(f"not a call: {_USAGE}") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _Refused(f"not a call: {_USAGE}")
    name = call.func.id
    if name not in ("search", "open", "find"):
        raise _Refused(f"no tool {_shown(name)}: {_USAGE}")
    values = [a.value for a in call.args if isinstance(a, ast.Constant) and type(a.value) in (str, int)]
    if len(call.args) != 1 or len(values) != 1 or call.keywords:
        raise _Refused(f"{name} takes one {'number' if name == 'open' else 'text in quotes'}: {_USAGE}")
    return name, values[0]


def _shown(value: str | int) -> str:
    text = " ".join(str(value)[:200].split())
    return text if len(text) <= 40 else f"{text[:37]}..."


class SearchTool:
    """The tools of one episode, which remember the opened document. Used by one thread at a time; never raises."""

    def __init__(self, documents: Library, *, results: int, characters: int):
        """
        Args:
            results: documents that a search lists. characters: an observation is cut to this length.
        """
        self._library, self._results, self._characters = documents, results, characters
        self._opened: Sequence[str] | None = None

    def run(self, action: str) -> Observation:
        """Run one call and describe its outcome."""
        try:
            name, argument = parse_call(action)
            found = {"search": self._search, "open": self._open, "find": self._find}[name](argument)
            return Observation(self._cut(found))
        except _Refused as problem:
            return Observation(self._cut(f"error: {problem}"), True, "error")
        except Exception as failure:  # whatever breaks here must not end the rollout
            return Observation(f"error: tool failure: {type(failure).__name__}", True, "tool_failure")

    def _search(self, text: str | int) -> str:
        found = self._library.search(str(text), self._results)
        return "\n".join(self._library.lines[number] for number in found) or "no results"

    def _open(self, number: str | int) -> str:
        try:
            wanted = int(number)
        except ValueError:
            wanted = -1
        if wanted not in self._library.sentences:
            raise _Refused(f"no document {_shown(number)}: open takes a number that search listed")
        self._opened = self._library.sentences[wanted]
        return joined(self._opened, self._library.style)

    def _find(self, text: str | int) -> str:
        if self._opened is None:
            raise _Refused("no document is open: open(number) first")
        wanted = str(text).casefold().strip()
        if not wanted:
            raise _Refused('find takes a text: find("text")')
        found = [s for s in self._opened if wanted in s.casefold()]
        return joined(found, self._library.style) or "not in this document"

    def _cut(self, text: str) -> str:
        return text if len(text) <= self._characters else f"{text[: self._characters - 4]} ..."
