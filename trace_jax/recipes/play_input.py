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
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
_DANGLING = re.compile(
    r"(?:,|\b(?:select|from|where|and|or|by|join|on|with|as|union|having|when|then|else|case|using|not|in|between|limit))"
    r"\s*\Z",
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
    """Whether an entry goes on in the next line: an open bracket, string or block, or a backslash at its end."""
    text = "\n".join(lines)
    return _sql_open(text, len(lines)) if is_sql(text) else _python_open(text, len(lines))


def _sql_open(text: str, lines: int) -> bool:
    bare = _QUOTED.sub("''", text).rstrip()
    if bare.endswith(";"):
        return False
    unclosed = sum(bare.count(c) for c in "([{") > sum(bare.count(c) for c in ")]}")
    quoted = any(mark in bare.replace("''", "") for mark in ("'", '"', "/*"))
    # Once it has a second line nothing but `;` or an empty line can tell its end.
    return lines > 1 or unclosed or quoted or text.rstrip().endswith("\\") or bool(_DANGLING.search(bare))


def lacks_from(text: str) -> bool:
    """Whether this is a SELECT that no FROM has followed yet, nor a semicolon."""
    bare = _QUOTED.sub("''", text).rstrip()
    begins = bool(re.match(r"select\b", bare, re.IGNORECASE)) and is_sql(text)
    return begins and not bare.endswith(";") and not re.search(r"\bfrom\b", bare, re.IGNORECASE)


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
