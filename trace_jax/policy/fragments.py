"""Mining of long frequent fragments, which the tokenizer keeps as single pieces.

Transcripts of tool use repeat themselves: the same clauses of a query, the same skeleton of an answer. Kept as single
pieces they make an episode several times shorter. Data must not disappear inside a fragment, or a value read in a
result and the same value written in an answer would be different tokens: numbers and ALL_CAPS identifiers are barriers
that no fragment contains or crosses, and a line break beside a number is one too.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|\n|[^\S\n]+|.", re.S)
_IDENTIFIER = re.compile(r"\b[A-Z][A-Z_]*[A-Z]\b")
_ROW_BREAK = re.compile(r"\n(?=-?\.?\d)|(?<=\d)\n")
# Words of the query language are part of a clause, not data.
_QUERY_WORDS = """
ABS ALL AND ANY ARRAY AS ASC AVG BETWEEN BIGINT BOOLEAN BY CASE CAST COALESCE COUNT CROSS CUBE DATE DESC DESCRIBE
DISTINCT DOUBLE ELSE END EXCEPT EXISTS EXP FALSE FILTER FIRST FOLLOWING FROM FULL GREATEST GROUP GROUPING HAVING IF IN
INNER INTEGER INTERSECT INTERVAL IS JOIN LAG LAST LEAD LEAST LEFT LIKE LIMIT LN LOG MAX MEAN MEDIAN MIN MOD NOT NULL
NULLIF NULLS NUMERIC OFFSET ON OR ORDER OUTER OVER PARTITION PIVOT POW POWER PRECEDING QUALIFY RANGE REAL RIGHT ROUND
ROW ROWS SELECT SETS SHOW SIGN SQRT STDDEV SUM SUMMARIZE TABLE THEN TRUE UNBOUNDED UNION UNPIVOT USING VALUES VARCHAR
VARIANCE WHEN WHERE WINDOW WITH
"""
_KEYWORDS = frozenset(_QUERY_WORDS.split())


def identifiers(texts: Iterable[str], minimum: int) -> list[str]:
    """ALL_CAPS identifiers (query keywords aside) seen at least `minimum` times, the most frequent first."""
    counts = Counter(word for text in texts for word in _IDENTIFIER.findall(text) if word not in _KEYWORDS)
    return [word for word, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if n >= minimum]


def mine(
    texts: Iterable[str], *, limit: int, min_characters: int, minimum: int, atoms: Iterable[str] = ()
) -> list[str]:
    """At most `limit` fragments whose use shortens the texts most.

    Adjacent words are merged by frequency, as byte-pair encoding does with characters; then the merged fragments worth
    least are dropped until `limit` are left. The worth of a fragment is its number of uses times the tokens it saves
    against being spelled with the other fragments.

    Args:
        texts: messages; a fragment lies inside one of them.
        limit: number of fragments.
        min_characters: shorter fragments are left to the tokenizer's own training.
        minimum: uses below which a fragment is not considered.
        atoms: further words that no fragment may contain.
    """
    chunks = Counter(chunk for text in texts for chunk in _split_at_barriers(text, frozenset(atoms)))
    candidates = {c for c in _merge(chunks, minimum) if len(c) >= min_characters}
    strings = Counter({"".join(chunk): n for chunk, n in chunks.items()})
    while candidates:
        index = _index(candidates)
        uses: Counter[str] = Counter()
        for text, n in strings.items():
            for piece in _cover(text, index)[0]:
                uses[piece] += n
        worth = {c: uses[c] * (_cover(c, index, without=c)[1] - 1) for c in candidates}
        ranked = sorted((c for c in candidates if uses[c] >= minimum), key=lambda c: (-worth[c], c))
        if len(ranked) <= limit and len(ranked) == len(candidates):
            return ranked
        # Dropping one fragment changes the worth of its parts, so the list shrinks by steps.
        candidates = set(ranked[: max(limit, int(len(ranked) * 0.8))])
    return []


def _split_at_barriers(text: str, atoms: frozenset[str]) -> Iterable[tuple[str, ...]]:
    """Runs of words between barriers; a run of one word is nothing to merge and is left out."""
    row_breaks = {match.start() for match in _ROW_BREAK.finditer(text)}
    run: list[str] = []
    for match in _WORD.finditer(text):
        word = match.group()
        data = _IDENTIFIER.fullmatch(word) and word not in _KEYWORDS
        if data or word in atoms or any(c.isdigit() for c in word) or match.start() in row_breaks or "\u2581" in word:
            if len(run) > 1:
                yield tuple(run)
            run = []
        else:
            run.append(word)
    if len(run) > 1:
        yield tuple(run)


def _merge(chunks: Counter[tuple[str, ...]], minimum: int) -> set[str]:
    """Every fragment that greedy merging of the most frequent adjacent pair makes."""
    words = [list(chunk) for chunk in chunks]
    weights = list(chunks.values())
    counts: Counter[tuple[str, str]] = Counter()
    where: dict[tuple[str, str], set[int]] = defaultdict(set)

    def count(i: int, sign: int) -> None:
        for pair in zip(words[i], words[i][1:], strict=False):
            counts[pair] += sign * weights[i]
            where[pair].add(i)

    for i in range(len(words)):
        count(i, +1)
    made: set[str] = set()
    while counts:
        pair, frequency = max(counts.items(), key=lambda item: (item[1], item[0]))
        if frequency < minimum:
            break
        merged = pair[0] + pair[1]
        made.add(merged)
        for i in sorted(where.pop(pair)):
            count(i, -1)
            old, new, j = words[i], [], 0
            while j < len(old):
                if j + 1 < len(old) and (old[j], old[j + 1]) == pair:
                    new.append(merged)
                    j += 2
                else:
                    new.append(old[j])
                    j += 1
            words[i] = new
            count(i, +1)
        del counts[pair]
    return made


def _index(candidates: Iterable[str]) -> dict[str, list[str]]:
    """Candidates by their first four characters, longest first: the tokenizer also takes the longest match."""
    index: dict[str, list[str]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda c: (-len(c), c)):
        index[candidate[:4]].append(candidate)
    return index


def _cover(text: str, index: dict[str, list[str]], without: str | None = None) -> tuple[list[str], int]:
    """Fragments found from left to right, and the tokens of the whole text (a word outside a fragment counts one)."""
    found, tokens, i = [], 0, 0
    while i < len(text):
        for candidate in index.get(text[i : i + 4], ()):
            if candidate != without and text.startswith(candidate, i):
                found.append(candidate)
                i += len(candidate)
                break
        else:
            i = _WORD.match(text, i).end()
        tokens += 1
    return found, tokens
