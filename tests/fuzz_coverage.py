"""A small coverage-guided fuzzer: mutate a corpus, keep what reaches a new edge of the code under test.

An edge is a pair of lines executed one after the other in one of the watched files, counted by powers of two as AFL
does. Deterministic for a seed.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

SPLICE = 0.2  # share of children that have two parents
MAX_LENGTH = 4000


@dataclass
class Found:
    """What a run of the fuzzer saw: inputs tried, edges reached, inputs kept, failures as (input, error)."""

    tried: int = 0
    edges: set = field(default_factory=set)
    corpus: list[str] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    slowest: float = 0.0  # seconds, with tracing


def fuzz(
    target: Callable[[str], Any],
    modules: Sequence[ModuleType],
    seeds: Sequence[str],
    words: Sequence[str],
    rounds: int,
    seed: int,
    limit_s: float = 2.0,
) -> Found:
    """Run `target` on the seeds and on `rounds` mutations. A failure is an exception, or more than `limit_s` seconds.

    Args:
        target: the function; it checks its own result by assertions.
        modules: whose lines are watched.
        seeds: inputs to begin with.
        words: pieces of text that mutations insert.
        rounds: number of mutations.
        seed: of the random numbers.
        limit_s: seconds an input may take.
    """
    files = {module.__file__ for module in modules}
    rng, found = random.Random(seed), Found()
    for text in seeds:
        _try(target, files, text, found, limit_s)
    for _ in range(rounds):
        parent = rng.choice(found.corpus)
        child = _mutate(rng, parent, rng.choice(found.corpus) if rng.random() < SPLICE else None, words)
        _try(target, files, child, found, limit_s)
        if len(found.failures) > 5:
            break
    return found


def _try(target: Callable[[str], Any], files: set[str], text: str, found: Found, limit_s: float) -> None:
    counts: dict[tuple[str, int, int], int] = {}

    def watch(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        name, last = frame.f_code.co_filename, [frame.f_lineno]

        def line(frame, event, argument):
            if event == "line":
                edge = (name, last[0], frame.f_lineno)
                counts[edge] = counts.get(edge, 0) + 1
                last[0] = frame.f_lineno
            return line

        return line

    before, start = sys.gettrace(), time.perf_counter()
    sys.settrace(watch)
    try:
        target(text)
    except Exception as error:  # whatever it raises is the finding
        found.failures.append((text, f"{type(error).__name__}: {error}"))
    finally:
        sys.settrace(before)
    took = time.perf_counter() - start
    found.tried += 1
    found.slowest = max(found.slowest, took)
    if took > limit_s:
        found.failures.append((text, f"took {took:.1f} s"))
    seen = {(*edge, count.bit_length()) for edge, count in counts.items()}
    if not seen <= found.edges or not found.corpus:
        found.edges |= seen
        found.corpus.append(text)


def _mutate(rng: random.Random, text: str, other: str | None, words: Sequence[str]) -> str:
    if other is not None:
        text = text[: rng.randrange(len(text) + 1)] + other[rng.randrange(len(other) + 1) :]
    for _ in range(1 << rng.randrange(4)):
        at = rng.randrange(len(text) + 1)
        to = min(len(text), at + 1 + rng.randrange(8))
        kind = rng.randrange(7)
        if kind == 0:
            text = text[:at] + text[to:]
        elif kind == 1:
            text = text[:at] + rng.choice(words) + text[at:]
        elif kind == 2:
            text = text[:at] + rng.choice(words) + text[to:]
        elif kind == 3:
            text = text[:at] + chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x110000)))) + text[at:]  # fmt: skip  # noqa: E501
        elif kind == 4:
            text = text[:at] + text[at:to] * (1 << rng.randrange(8)) + text[to:]
        elif kind == 5 and text:
            where = rng.randrange(len(text))
            text = text[:where] + text[where].swapcase() + text[where + 1 :]
        else:
            text = text[:at] + text[at:to][::-1] + text[to:]
    return text[:MAX_LENGTH]
