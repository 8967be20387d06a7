"""Functions that an analyst expects and the sandbox lacks, and what the sandbox has instead of the rest.

The helpers are Python source that runs inside the sandbox, so that a call in a loop costs no round trip to the host;
they are defined when an episode's code first mentions one. `import statistics` gives the same functions.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pydantic_monty as monty

from trace_jax.environments import analyst_functions
from trace_jax.warehouse.sql_errors import nearest

MODULES = (
    "math", "statistics", "re", "json", "datetime", "random", "collections", "itertools", "functools", "decimal",
    "bisect", "copy", "dataclasses", "typing",
)  # fmt: skip

SOURCE = inspect.getsource(analyst_functions)
NAMES = (
    "mean", "median", "quantile", "variance", "stdev", "pstdev", "zscore", "z_score", "pct_change", "corr"
)  # fmt: skip
_BUILTINS = (
    "abs", "all", "any", "bool", "dict", "enumerate", "filter", "float", "int", "isinstance", "len", "list", "map",
    "max", "min", "print", "range", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "type", "zip",
)  # fmt: skip
_BINDING = re.compile(r"^(?:(?:def|class|for)\s+([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*=(?!=))", re.MULTILINE)
MAX_MODULE_VALUES = 100_000  # of one call of the `statistics` module, which computes outside the sandbox

DOCUMENTATION = """Functions: mean, median, stdev, zscore and quantile(values, q) of a list or of (rows, 'column'),
pct_change(before, after) or of a list, corr(a, b); all leave out None and NaN. print(table(rows))
prints rows aligned."""


def mentioned(code: str) -> bool:
    """Whether code may use a helper: one of their names stands in it as a word, not as an attribute.

    By hand, because this is asked of every call and one pattern for all names takes a tenth of a millisecond.
    """
    for name in NAMES:
        at = code.find(name)
        while at >= 0:
            before, after = code[at - 1 : at], code[at + len(name) : at + len(name) + 1]
            if not (before.isalnum() or before in ("_", ".")) and not (after.isalnum() or after == "_"):
                return True
            at = code.find(name, at + 1)
    return False


def unknown_module(name: str) -> str:
    """What to write instead of an import that the sandbox does not have."""
    return f"; there are {', '.join(MODULES)}; tables are read with sql()"


def unknown_name(name: str, defined: Sequence[str]) -> str:
    """Names that exist, the nearest first.

    Args:
        name: what was not found.
        defined: names that earlier calls of the episode have defined.
    """
    builtin = [*NAMES, "sql", "table", *_BUILTINS]
    near = nearest(name, [*defined, *builtin])
    own = [n for n in dict.fromkeys(defined) if n not in near]
    text = f"; did you mean {' or '.join(near)}?" if near else ""
    if own:
        return text + f"; defined so far: {', '.join(own[-20:])}"
    return text if near else "; nothing of that name was defined in a call that ended well"


def defined_names(calls: Iterable[str]) -> list[str]:
    """The names that calls bind at their top level, as far as their text shows."""
    return [a or b for code in calls for a, b in _BINDING.findall(code)]


@functools.cache
def modules() -> dict[str, monty.ExternalModule]:
    """Modules that the sandbox may import beside its own."""
    names = {name: name for name in ("mean", "median", "variance", "stdev", "pstdev")} | {"fmean": "mean"}
    return {
        "statistics": monty.ExternalModule(
            {name: _bounded(getattr(analyst_functions, real)) for name, real in names.items()}
        )
    }


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(values: Sequence[Any]) -> Any:
        if not isinstance(values, (list, tuple)):
            values = list(values)
        if len(values) > MAX_MODULE_VALUES:
            raise ValueError(f"more than {MAX_MODULE_VALUES} values: use {function.__name__}() without the module")
        return function(values)

    return call
