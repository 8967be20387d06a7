"""Two agents without a policy: the explorer knows the tools and nothing else, the solver knows the way.

A policy that is trained from scratch must first learn how calls and answers are written. It does so from the
explorer's transcripts, right or wrong: they hold no strategy, which is left for reinforcement learning to find.
"""

from __future__ import annotations

import re

import numpy as np

from trace_jax.environments.base import Episode, Task, Transcript
from trace_jax.environments.search.corpus import WORDS
from trace_jax.environments.search.prompt import stated

_WORD = f"(?:{'|'.join(sorted(WORDS, key=len, reverse=True))})"
_NAME = re.compile(rf"\b{_WORD}(?: {_WORD})?\b")
_LISTED = re.compile(r"^\[?(\d+)\]?:? ?(?=[A-Z])", re.MULTILINE)
# Weights of the explorer's calls, where there is something to open or to look in.
_SEARCH, _OPEN, _FIND = 0.4, 0.5, 0.1
MEAN_CALLS = 4  # of the explorer, which stops after a geometric number of calls


def explore(episode: Episode, task: Task, rng: np.random.Generator, calls: int) -> Transcript:
    """Valid calls on names and numbers that were read, in random order; then a random name that was read.

    Args:
        episode: an open attempt; only its `step` is used.
        task: the question (its labels and gold answer are not read).
        rng: decides everything.
        calls: the most tool calls to make, >= 1.
    """
    names, listed, opened = _read(task.user, []), [], False
    steps: list[tuple[str, str]] = []
    for _ in range(min(int(rng.geometric(1 / MEAN_CALLS)), calls)):
        weights = np.array([_SEARCH, _OPEN * bool(listed), _FIND * opened])
        tool = ("search", "open", "find")[rng.choice(3, p=weights / weights.sum())]
        if tool == "open":
            code = f"open({listed[rng.integers(len(listed))]})"
        else:
            code = f'{tool}("{names[rng.integers(len(names))]}")'
        text = episode.step(code).text
        steps.append((code, text))
        names = _read(text, names)
        if tool == "search":
            listed = [int(number) for number in _LISTED.findall(text)]
        opened |= tool == "open"
    return Transcript(steps, names[rng.integers(len(names))])


def _read(text: str, names: list[str]) -> list[str]:
    """The names known so far and those of a text, in the order in which they were first read."""
    return list(dict.fromkeys([*names, *_NAME.findall(text)]))


def solve(episode: Episode, task: Task, style: str) -> Transcript:
    """The straight way: search each entity of the chain, open its document, look the fact up. The upper baseline.

    In the compact wording a fact is looked up with `find`, for a relation stands in the document as it does in the
    question; in the full one it is read in the document.

    Args:
        episode: an open attempt; only its `step` is used.
        task: its labels say where the chain starts and which facts it follows, not what they are.
        style: prompt style, "compact" or "full".
    """
    name, steps = str(task.labels["start"]), []

    def call(code: str) -> str:
        steps.append((code, episode.step(code).text))
        return steps[-1][1]

    for relation in task.labels["chain"]:
        for number in _LISTED.findall(call(f'search("{name}")')):
            text = call(f"open({number})")
            if text.startswith((f"{name}:", f"{name} is a ")):
                break
        if style == "compact":
            text = call(f'find("{relation}")')
        name = stated(text, name, relation, style) or name
    return Transcript(steps, name)
