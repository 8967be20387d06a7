"""The form of JSON files of ours that are read again: one that was edited, cut off or put there by somebody is refused.

A form is one of
    float, int, str, bool, None   a finite number (not a truth value), a whole one, a text, a truth value, null
    (form, form, ...)             any of these
    [form]                        a list of such
    {str: form}                   an object of such, by any name
    {"name": form, "other?": form}  an object with at least these entries; of `other` it may have none
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError

NUMBER = (float, None)  # JSON has no NaN: what is not finite is null
LARGEST = 1e15  # beyond it no figure of ours is
AGAIN = "remove it and run the command again"
_NAMES = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}


def read(path: Path, form: Any, mend: str = AGAIN) -> Any:
    """The content of a file.

    Args:
        mend: what to do about a damaged one.

    Raises:
        ConfigError: it cannot be read, is no JSON, or has another form.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        why = fault(found, form)
    except (OSError, ValueError, RecursionError) as error:
        why = _reason(error)
    if why:
        raise ConfigError(f"{path} is damaged ({why}): {mend}")
    return found


def read_lines(path: Path, form: Any, mend: str) -> list[Any]:
    """The lines of a file, each JSON. ConfigError as `read`."""
    found: list[Any] = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                found.append(json.loads(line))
                why = fault(found[-1], form)
            except (ValueError, RecursionError) as error:
                why = _reason(error)
            if why:
                raise ConfigError(f"cannot read {path} (line {number}: {why}): {mend}")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot read {path} ({_reason(error)}): {mend}") from None
    return found


def read_if(path: Path, form: Any) -> Any | None:
    """The content of a file that has a form, None of any other and of none."""
    try:
        return read(path, form)
    except ConfigError:
        return None


def fault(value: Any, form: Any, where: str = "") -> str:
    """What keeps a value from having a form, in words with the place of it; "": nothing."""
    if isinstance(form, tuple):
        return _of_any(value, form, where)
    if isinstance(form, list) and isinstance(value, list):
        return next((why for i, v in enumerate(value) if (why := fault(v, form[0], f"{where}[{i}]"))), "")
    if isinstance(form, Mapping) and isinstance(value, dict):
        return _of_object(value, form, where)
    if _is(value, form):
        return ""
    if form in (float, int) and isinstance(value, float | int) and not isinstance(value, bool):
        if not abs(value) < LARGEST:
            return f"{where or 'it'} is no number below {LARGEST:g}"
        return f"{where or 'it'} is {value:g}, not {_named(form)}"
    return f"{where or 'it'} is {_named_value(value)}, not {_named(form)}"


def _of_any(value: Any, forms: tuple[Any, ...], where: str) -> str:
    found = [fault(value, form, where) for form in forms]
    if not all(found):
        return ""
    # of the alternative that it was meant to be, where that can be told
    same = [why for why, form in zip(found, forms, strict=True) if type(form) is type(value)]
    return same[0] if same else f"{where or 'it'} is {_named_value(value)}, not {' or '.join(map(_named, forms))}"


def _of_object(value: dict[str, Any], form: Mapping[Any, Any], where: str) -> str:
    inside = f"{where}." if where else ""
    if str in form:
        return next((why for k, v in value.items() if (why := fault(v, form[str], f"{inside}{k}"))), "")
    for name, wanted in form.items():
        key = name.removesuffix("?")
        if key not in value:
            if key == name:
                return f"it lacks {inside}{key}"
        elif why := fault(value[key], wanted, f"{inside}{key}"):
            return why
    return ""


def _is(value: Any, form: Any) -> bool:
    if form is None or isinstance(form, list | Mapping):
        return form is None and value is None
    if form in (float, int):
        kinds = (int,) if form is int else (int, float)
        known = isinstance(value, kinds) and not isinstance(value, bool)
        return known and abs(value) < LARGEST  # NaN is not
    return isinstance(value, form)


def _named(form: Any) -> str:
    if isinstance(form, tuple):
        return " or ".join(map(_named, form))
    if isinstance(form, list | Mapping):
        return "a list" if isinstance(form, list) else "an object"
    return "null" if form is None else _NAMES[form]


def _named_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return _named(value) if isinstance(value, list | dict) else _NAMES[type(value)]


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return (error.strerror or type(error).__name__).lower()
    return "nested too deeply" if isinstance(error, RecursionError) else f"no JSON: {' '.join(str(error).split())}"
