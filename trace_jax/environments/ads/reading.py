"""Reads what an agent asked: attributes, metrics, comparison and noise estimate of the SQL in its Python.

It is no SQL parser. Agents write broken and unusual queries, and a labeller must say something of each: it looks for
what a query cannot do without (a grouping, a condition on days, a square root) and never raises.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trace_jax.simulator.vocabulary import ATTRIBUTES, DRIVER_ATTRIBUTES

Pair = tuple[str, str]

MAX_CHARACTERS = 20_000  # of one call; the rest is not read
MAX_VARIANTS = 64  # queries that loops over literal lists may make of one; also groupings of one that are read
_ATTRIBUTE_OF = {value: a for a, values in ATTRIBUTES.items() for value in values}
_VALUE = re.compile(r"(?<![A-Z_])(" + "|".join(sorted(_ATTRIBUTE_OF, key=len, reverse=True)) + r")(?![A-Z_])")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_NOISE = re.compile(
    r"\bsqrt\b|\bstd|\bvar(_|iance)|\bstatistics\b|\*\*\s*\(?0?\.5|\bpower\s*\([^()]*\.5|\bz_?scores?\b", re.I
)
# Days before and after, or one day or week beside another.
_HALVES = re.compile(
    r"\bds\s*(<|>|between\b)|(<|>)=?\s*ds\b|group\s+by[^()]*\bds\b|group\s+by\s*\(*\s*ds\b|\b(date_trunc|week)\b", re.I
)
_COLUMNS = ("impressions", "clicks", "orders", "spend", "in_stock", "budget")
# What a metric is computed from; any of the sets is enough.
_METRICS = {
    "ctr": {"clicks", "impressions"},
    "cvr": {"orders", "clicks"},
    "cpc": {"spend", "clicks"},
    "volume": {"impressions"},
    "stock": {"in_stock"},
    "budget": {"budget"},
}


@dataclass(frozen=True)
class Query:
    """One SQL text.

    Attributes:
        groups: attributes of each grouping, one set for each grouping set; the empty set for totals.
        filters: (attribute, value) pairs that rows are restricted to.
        metrics: of "ctr", "cvr", "cpc", "volume", "share", "stock", "budget", those that its columns give.
        compares: whether it tells earlier days from later ones.
        noise: whether it estimates how large a change of nothing may be.
    """

    groups: frozenset[frozenset[str]]
    filters: frozenset[Pair]
    metrics: frozenset[str]
    compares: bool
    noise: bool

    def slices(self, attributes: int) -> Iterator[frozenset[str]]:
        """Attributes by which it splits the campaign into slices of so many attributes; one that is fixed by a filter
        counts."""
        fixed = {a for a, _ in self.filters}
        for group in self.groups:
            if group and len(group | fixed) == attributes:
                yield group | fixed
            elif len(group) == attributes:
                yield group
        if len(fixed) == attributes:
            yield frozenset(fixed)

    def shows(self, attributes: frozenset[str]) -> bool:
        """Whether it shows slices by exactly these attributes, or the whole campaign split more finely."""
        finer = not self.filters and any(attributes <= group for group in self.groups)
        return finer or attributes in set(self.slices(len(attributes)))

    @property
    def totals(self) -> bool:
        """Whether it looks at the campaign as a whole: no attribute splits or restricts it."""
        return not self.filters and not any(self.groups)


@dataclass(frozen=True)
class Step:
    """One call: its queries, what it printed and whether it worked."""

    queries: tuple[Query, ...]
    code: str
    text: str
    works: bool

    @property
    def rows(self) -> list[tuple[frozenset[str], list[str]]]:
        """Lines of the result: values of attributes in them, and their numbers as printed."""
        result = []
        for line in self.text.splitlines():
            values = frozenset(_VALUE.findall(line))
            result.append((values, _NUMBER.findall(_VALUE.sub(" ", line))))
        return result


def read(code: str, text: str) -> Step:
    """A call and its observation."""
    code = code[:MAX_CHARACTERS]
    works = not any(line.startswith("error:") for line in text.splitlines())
    return Step(_queries(code), code, text, works)


@functools.lru_cache(maxsize=4096)  # attempts at one task, and all labellers of an attempt, ask the same
def _queries(code: str) -> tuple[Query, ...]:
    noise = bool(_NOISE.search(code))  # may be estimated in Python
    return tuple(_query(sql, noise, code) for sql in statements(code))


def statements(code: str) -> list[str]:
    """SQL texts in a call's Python, f-strings over literal lists written out."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = re.findall(r'"""(.*?)"""|\'\'\'(.*?)\'\'\'|"([^"\n]*)"', code, re.S)
        texts = ["".join(parts) for parts in found] or [code]
    else:
        texts = list(_texts(tree))
    return [t for t in texts if re.search(r"\b(select|from)\b", t, re.I)]


def _texts(tree: ast.AST) -> Iterator[str]:
    """String literals of a program, each once; parts of an f-string only as the whole."""
    known: dict[str, list[str]] = {}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            known[node.target.id] = _literals(node.iter)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            known.setdefault(node.targets[0].id, _literals(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield from _written_out(node, known)


def _literals(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
    return []


def _written_out(node: ast.JoinedStr, known: dict[str, list[str]]) -> Iterator[str]:
    choices: dict[str, list[str]] = {}
    for part in node.values:
        if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
            choices[part.value.id] = known.get(part.value.id) or ["?"]
    for values in itertools.islice(itertools.product(*choices.values()), MAX_VARIANTS):
        named = dict(zip(choices, values, strict=True))
        yield "".join(
            str(part.value)
            if isinstance(part, ast.Constant)
            else named.get(getattr(getattr(part, "value", None), "id", ""), "?")
            for part in node.values
        )


def _query(sql: str, noise: bool, code: str) -> Query:
    if not re.search(r"\bgroup\s+by\b|\b(sum|avg|mean|median)\s*\(", sql, re.I):
        return _in_python(sql, noise, code)
    low = sql.lower()
    columns = {c for c in _COLUMNS if re.search(rf"\b{c}\b", low)}
    metrics = {name for name, needed in _METRICS.items() if needed <= columns}
    groups = _groups(sql)
    # Impressions by slice are shares but for one division, unless they only divide something else.
    if _not_below(low, "impressions") and (any(groups) or re.search(r"\bshare\b|\bover\s*\(", low)):
        metrics.add("share")
    return Query(
        frozenset(groups),
        frozenset(_filters(sql)),
        frozenset(metrics),
        bool(_HALVES.search(sql)),
        noise or bool(_NOISE.search(sql)),
    )


def _in_python(sql: str, noise: bool, code: str) -> Query:
    """Rows as they are, added up in Python: by the attributes and columns that the code names."""
    named = set(re.findall(r"""['"](\w+)['"]""", code)) | set(re.findall(r"\w+", sql.lower()))
    metrics = {name for name, needed in _METRICS.items() if needed <= named}
    groups = {frozenset({a}) for a in ATTRIBUTES if a in named} or {frozenset()}
    if "impressions" in named and any(groups):
        metrics.add("share")
    return Query(frozenset(groups), frozenset(_filters(sql)), frozenset(metrics), "ds" in named, noise)


def _not_below(text: str, column: str) -> bool:
    """Whether a column stands anywhere but below a line of division."""
    for found in re.finditer(rf"\b{column}\b", text):
        before = re.sub(r"(?:\s|\b(?:sum|nullif|power|coalesce|greatest)\()+$", "", text[: found.start()][-80:])
        if not before.endswith("/"):
            return True
    return False


def _groups(sql: str) -> set[frozenset[str]]:
    """Grouping sets of at most two attributes: finer ones are the rows themselves, an intermediate step."""
    found: set[frozenset[str]] = set()
    lists = re.findall(r"\bselect\b(.*?)(?=\bfrom\b|\bgroup\s+by\b|$)", sql, re.I | re.S)
    # Under grouping sets a name put together of attributes is made of one or two of them at a time.
    several = re.search(r"\b(grouping\s+sets|cube|rollup)\b", sql, re.I)
    named = [] if several else [item for text in lists for item in _named(text)]
    for clause in _clauses(sql):
        # A name that the query gives to an attribute, or to several put together, stands for them.
        clause += "".join(f" {' '.join(a)}" for name, a in named if re.search(rf"\b{name}\b", clause))
        inner = re.search(r"\b(?:grouping\s+sets|cube|rollup)\s*\((.*)", clause, re.I | re.S)
        if inner is None:
            found.add(_attributes(clause))
        elif re.match(r"\s*grouping", inner[0], re.I):
            found |= {_attributes(part) for part in _parts(inner[1])}
        else:
            names = sorted(_attributes(inner[1]))
            found |= {frozenset(c) for n in (1, 2) for c in itertools.combinations(names, n)}
    if re.search(r"\bgroup\s+by\s+(all\b|\d)", sql, re.I):
        # The columns that are not aggregated; of the whole text, since a subquery of rows groups finer anyway.
        found.add(_attributes(re.sub(r"\w+\s*\([^()]*\)", " ", " ".join(lists))))
    return {g for g in found if len(g) <= 2}


def _named(selected: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Names that a SELECT list gives to expressions of attributes, with these attributes."""
    for part in _parts(f"{selected})"):
        words, attributes = re.findall(r"[A-Za-z_]\w*", part), _attributes(part)
        if attributes and words[-1].lower() not in ATTRIBUTES:
            yield re.escape(words[-1]), attributes


def _clauses(sql: str) -> Iterator[str]:
    """What follows each GROUP BY, up to the end of its own query."""
    for start in itertools.islice(re.finditer(r"\bgroup\s+by\b", sql, re.I), MAX_VARIANTS):
        depth, end = 0, len(sql)
        for k in range(start.end(), len(sql)):
            depth += (sql[k] == "(") - (sql[k] == ")")
            if depth < 0:
                end = k
                break
        yield re.split(r"\bhaving\b|\border\s+by\b|\blimit\b|\bqualify\b", sql[start.end() : end], flags=re.I)[0]


def _parts(text: str) -> Iterator[str]:
    """Top-level members of a list whose opening bracket was just before the text."""
    depth, last = 0, 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth < 0 or (depth == 0 and c == ","):
            yield text[last:k]
            last = k + 1
        if depth < 0:
            return
    yield text[last:]


def _attributes(text: str) -> frozenset[str]:
    return frozenset(a for a in ATTRIBUTES if re.search(rf"\b{a}\b", text, re.I))


def _filters(sql: str) -> Iterator[Pair]:
    for attribute, value in re.findall(r"\b(\w+)\s*=\s*'(\w+)'", sql):
        if value.upper() in ATTRIBUTES.get(attribute.lower(), ()):
            yield attribute.lower(), value.upper()


def shown(step: Step) -> dict[str, set[float]]:
    """Numbers that a call printed by metric, where names of columns or of rows tell; all of them under ""."""
    found: dict[str, set[float]] = {"": set()}
    columns = _columns(step)
    for line, (values, numbers) in zip(step.text.splitlines(), step.rows, strict=True):
        found[""] |= {float(n) for n in numbers}
        words = re.findall(r"[a-z_]+", _VALUE.sub(" ", line))
        if len(numbers) == 1 and len(words) == 1:
            found.setdefault(words[0], set()).add(float(numbers[0]))
        elif values and len(numbers) == len(columns):
            for name, number in zip(columns, numbers, strict=True):
                found.setdefault(name, set()).add(float(number))
    return found


def _columns(step: Step) -> Sequence[str]:
    """Names of the numeric columns of a slice table: those of its header, or of the last SELECT."""
    header = step.text.splitlines()[:1]
    names = header[0].split() if header and not _NUMBER.search(header[0]) else _selected(step.code)
    return [n.lower() for n in names if n.lower() not in (*DRIVER_ATTRIBUTES, *ATTRIBUTES, "k", "slice")]


@functools.lru_cache(maxsize=4096)
def _selected(code: str) -> tuple[str, ...]:
    """Names of the columns of the last SELECT of a call."""
    texts = statements(code)
    start = texts[-1].lower().rfind("select") if texts else -1
    if start < 0:
        return ()
    last = re.split(r"\bfrom\b", texts[-1][start + len("select") :], maxsplit=1, flags=re.I)[0]
    return tuple(words[-1] for part in _parts(f"{last})") if (words := re.findall(r"[A-Za-z_]\w*", part)))
