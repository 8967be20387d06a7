"""What a person types at `trace-jax play`: whether it is SQL or Python, and whether it goes on in the next line."""

from __future__ import annotations

import codeop
import re
import warnings
from collections.abc import Sequence

_QUERY = re.compile(r"\(*\s*(?:select|with|from)\b(?!\s*(?:=(?!=)|[.:,)]))", re.IGNORECASE)
# Statements that are not a query are sent as SQL, too: the database's refusal says more than Python's. Two words side
# by side are no Python, unless the second is an operator.
_STATEMENT = re.compile(
    r"(?:describe|show)\s*;?\s*\Z|(?:describe|desc|show|summarize|pivot|unpivot|table|values|explain|insert|update|delete"
    r"|create|drop|alter|copy|attach|install|load|pragma|set|call|use)\s+(?!(?:in|is|and|or|if|not|for)\b)[\w\"'(]",
    re.IGNORECASE,
)
_IMPORT = re.compile(r"from\s+[\w.]+\s+import\b")
_COMMENT = re.compile(r"('(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")|--[^\n]*|/\*.*?\*/", re.DOTALL)
_DANGLING = re.compile(
    r"(?:[,\\]|\b(?:select|from|where|and|or|by|join|on|with|as|union|except|intersect|having|when|then|else|case|using|not"
    r"|in|between|limit|explain|describe|summarize|(?:union|except|intersect)\s+all|union\s+(?:all\s+)?by\s+name))\s*\Z",
    re.IGNORECASE,
)
# What is no line of a query: a command of `play` or another name of one, a note, an answer, an import.
_NO_SQL = re.compile(
    r"\.[a-z]+(?![\w(])|\.\s*\Z|(?:quit|exit|help|\?)\s*\Z|#\s|\{\s*\"(?:decision|root_cause)\"|from\s+[\w.]+\s+import\b",
    re.IGNORECASE,
)


def is_sql(text: str) -> bool:
    """Whether an entry is meant as SQL and not as Python; judged by its beginning."""
    text = text.lstrip()
    if text.startswith(("--", "/*")):
        return True
    if _IMPORT.match(text) or re.match(r"with\b.*:\s*$", text, re.MULTILINE):
        return False
    return bool(_QUERY.match(text) or _STATEMENT.match(text))


def is_open(lines: Sequence[str]) -> bool:
    """Whether an entry goes on in the next line. SQL does until a `;` at the end of a line, Python while there is an
    open bracket, string or block, or a backslash at its end."""
    text = "\n".join(lines)
    return not _bare(text).endswith(";") if is_sql(text) else _python_open(text, len(lines))


def begins_another(lines: Sequence[str], line: str) -> bool:
    """Whether a line is none of the SQL entry before it: no SQL at all, or the beginning of another query.

    SELECT and FROM begin another query if this one has them already, WITH, DESCRIBE, SHOW and SUMMARIZE always; within
    brackets and quotes, and after words like UNION that something must follow, nothing does.
    """
    text = "\n".join(lines)
    if not is_sql(text):
        return False
    line = line.strip()
    if _NO_SQL.match(line):
        return True
    if is_unfinished(text) or not is_sql(line):
        return False
    word = re.split(r"\W", line, maxsplit=1)[0].lower()
    outside = _bare(text).lower()
    while (inner := re.sub(r"\([^()]*\)", " ", outside)) != outside:
        outside = inner
    if word in ("select", "from"):
        return bool(re.search(rf"\b{word}\b", outside) or re.match(r"\s*(?:describe|show|summarize)\b", outside))
    return word in ("with", "describe", "show", "summarize") and bool(outside.strip())


def is_unfinished(text: str) -> bool:
    """Whether something must follow this SQL: in an open bracket or string, or after a word like WHERE."""
    bare = _bare(text)
    unclosed = sum(bare.count(c) for c in "([{") > sum(bare.count(c) for c in ")]}")
    quoted = any(mark in bare.replace("''", "") for mark in ("'", '"', "/*"))
    return unclosed or quoted or bool(_DANGLING.search(bare))


def _bare(text: str) -> str:
    """SQL without comments and without what stands in quotes."""
    return _COMMENT.sub(lambda found: "''" if found[1] else " ", text).rstrip()


def _python_open(text: str, lines: int) -> bool:
    first = text.split("\n", 1)[0].rstrip()
    if lines > 1 and (first.endswith(":") or first.startswith("@")):
        return True  # a block: only an empty line ends it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return codeop.compile_command(text, symbol="exec") is None
        except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
            return False  # the sandbox will say what is wrong


def in_text(lines: Sequence[str]) -> bool:
    """Whether the entry stops inside a triple-quoted string, which may hold empty lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile("\n".join(lines), "entry", "exec")
        except SyntaxError as error:
            return "triple-quoted" in str(error)
        except (ValueError, OverflowError, MemoryError, RecursionError):
            return False
    return False


def code_of(entry: str) -> str:
    """The tool call of an entry: SQL becomes `sql(...)`, Python stays as it is."""
    if not is_sql(entry):
        return entry
    query = re.sub(r"\\[ \t]*(\n|\Z)", r"\1", entry).strip().rstrip(";").rstrip()
    for quotes in ('"""', "'''"):
        if "\\" not in query and quotes not in query and not query.endswith(quotes[0]):
            return f"sql({quotes}{query}{quotes})"
    return f"sql({query!r})"
