"""YAML and command-line overrides onto the frozen dataclasses of `trace_jax.config`.

Types are strict: an `int` field takes no float, no string and no boolean; a `float` field takes an `int` and the
exponent forms that YAML 1.1 reads as text (`1e-3`). A key that no dataclass has is refused with the nearest valid name.
Every refusal is a `ConfigError` of one line: what, where, and the mend.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_rules import shown, validate

_LISTS = {
    "lora.targets": "[query, value]",
    "lora.gate": "[intersection, abstaining]",
    "policy.mixers": "[delta, attention]",
}  # examples
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


class _StrictLoader(yaml.SafeLoader):
    """Safe loader that refuses a key given twice (plain YAML silently keeps the last)."""

    def compose_mapping_node(self, anchor):
        # Here, and not when the mapping is made: by then merge keys (`<<`) have put their fields among its own.
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "keys must be plain names", key.start_mark)
            if (key.tag, key.value) in seen:
                problem = f"`{shown(key.value)}` is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return node


def field_types(cls: type) -> dict[str, Any]:
    """Field name -> resolved type of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf of a configuration, in declaration order."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from flatten(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", value


def names(cls: type = RunConfig) -> list[str]:
    """Dotted names of all sections and fields."""
    found: list[str] = []
    for name, kind in field_types(cls).items():
        found.append(name)
        if dataclasses.is_dataclass(kind):
            found += [f"{name}.{inner}" for inner in names(kind)]
    return found


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that `name` most likely meant, or None. Compares whole dotted names and last parts; what is too
    short to resemble anything but by chance gets none."""
    valid, last = list(valid), _tail(name)
    if len(last) < 3:
        return None
    for full in difflib.get_close_matches(name, valid, n=3, cutoff=0.6):
        if difflib.SequenceMatcher(None, last, _tail(full)).ratio() >= 0.5:  # not alike for their sections alone
            return full
    tails: dict[str, str] = {}
    for full in valid:
        tails.setdefault(_tail(full), full)
    found = difflib.get_close_matches(last, tails, n=1, cutoff=0.6)
    return tails[found[0]] if found else None


def _tail(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _unknown(name: str, where: str, prefix: str) -> ConfigError:
    local = [n for n in names() if n.startswith(prefix)]
    meant = nearest(name, local) or nearest(name, names())
    mend = f"did you mean `{meant}`?" if meant else f"valid here: {', '.join(_children(prefix))}"
    return ConfigError(f"unknown key `{name}` in {where}: {mend}")


def _children(prefix: str) -> list[str]:
    depth = prefix.count(".")
    return [n for n in names() if n.startswith(prefix) and n.count(".") == depth]


def _show(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(kind, str(kind).replace("typing.", ""))


def convert(value: Any, kind: Any, name: str, where: str) -> Any:
    """`value` as read from YAML, checked against the type of field `name`.

    Raises:
        ConfigError: the value has another type; `where` names the file or the command line.
    """
    if name == "policy.remat":  # was true or false once; on the command line every value of a text field is text
        value = {"true": "full", "false": "none"}.get(str(value).lower(), value)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (kind,) = [a for a in args if a is not type(None)]
        return convert(value, kind, name, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(convert(v, args[0], f"{name}[{i}]", where) for i, v in enumerate(value))
    if origin is tuple:
        example = {float: "[1, 1, 1]", int: "[1, 2]", str: _LISTS.get(name, "[easy, hard]")}[args[0]]
        raise ConfigError(f"`{name}` in {where} takes a list, e.g. {example}, not {_got(value)}")
    if kind is float:
        number = _to_float(value)
        if number is not None:
            return number
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"`{name}` in {where} takes {_show(kind)}, not {_got(value)}")


def _got(value: Any) -> str:
    return "nothing" if value is None else f"`{shown(value)}`"


def _to_float(value: Any) -> float | None:
    """The finite number that `value` is or spells, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # `1__0`, or a whole number beyond any float
        return None
    return number if math.isfinite(number) else None


def build(cls: type, data: Mapping[str, Any], where: str, base: Any = None, prefix: str = "") -> Any:
    """A dataclass from nested mappings; fields not given keep the value of `base` (default: the class's defaults)."""
    base = cls() if base is None else base
    kinds = field_types(cls)
    changes = {}
    for key, value in data.items():
        name = f"{prefix}{shown(key)}"
        if key not in kinds:
            raise _unknown(name, where, prefix)
        kind = kinds[key]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise ConfigError(f"`{name}` in {where} is a section: put its fields under it, e.g. `{_example(name)}`")
            changes[key] = build(kind, value, where, getattr(base, key), f"{name}.")
        else:
            changes[key] = convert(value, kind, name, where)
    return dataclasses.replace(base, **changes)


def _example(section: str) -> str:
    return next(n for n in names() if n.startswith(f"{section}."))


def parse_overrides(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """`[("grpo.steps", "5")]` -> `{"grpo": {"steps": 5}}`; values are read as YAML scalars, so types stay strict."""
    nested: dict[str, Any] = {}
    valid = set(names())
    for raw_name, text in pairs:
        name = raw_name.replace("-", "_")
        if name not in valid:
            raise _unknown(name, "the command line", "")
        try:
            value = yaml.load(text, _StrictLoader)
        except Exception:  # as in `read_yaml`; the text itself then has the wrong type
            value = text
        if _leaf_type(name) is str:
            value = text  # `--name 12` names the run "12"
        *sections, leaf = name.split(".")
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"--{section} and --{name} set the same: give the section or its fields, not both")
        if isinstance(node.get(leaf), dict):
            raise ConfigError(f"--{name} and its fields set the same: give the section or its fields, not both")
        node[leaf] = value
    return nested


def _leaf_type(name: str) -> Any:
    kind: Any = RunConfig
    for part in name.split("."):
        kind = field_types(kind)[part]
    return kind


def read_yaml(path: Path, what: str = "config file") -> Mapping[str, Any]:
    """The mapping in a YAML file; `ConfigError` when it is missing, unreadable or not a mapping.

    Args:
        what: such a file is called in messages.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no such {what}: {path}{_similar_file(Path(path))}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"cannot read {what} {path}: {reason}") from None
    try:
        data = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise ConfigError(f"cannot parse {path}{line}: {shown(problem)}") from None
    except RecursionError:
        raise ConfigError(f"cannot parse {path}: it is nested too deeply, write plain sections and fields") from None
    except Exception as error:  # PyYAML lets ValueError, KeyError, ... of bad dates, numbers and tags through
        raise ConfigError(f"cannot parse {path}: a value in it cannot be read ({shown(str(error))})") from None
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must hold `section: {{field: value}}` entries, not a {type(data).__name__}")
    return data


def _similar_file(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f" (there is no directory {parent})"
    found = difflib.get_close_matches(path.name, sorted(p.name for p in parent.glob("*.y*ml")), n=1, cutoff=0.75)
    return f"; did you mean {parent / found[0]}?" if found else ""


def load(path: Path | str | None, overrides: Iterable[tuple[str, str]] = ()) -> RunConfig:
    """The validated configuration of a run: defaults, then the file, then the overrides.

    Raises:
        ConfigError: missing or malformed file, unknown key, wrong type, or an invalid combination.
    """
    config = RunConfig()
    if path is not None:
        config = build(RunConfig, read_yaml(Path(path)), str(path), config)
    config = build(RunConfig, parse_overrides(overrides), "the command line", config)
    validate(config)
    return config


def override(config: RunConfig, pairs: Iterable[tuple[str, str]]) -> RunConfig:
    """A validated copy with fields, by dotted name, set to what their texts say.

    Raises:
        ConfigError: as `load`.
    """
    changed = build(RunConfig, parse_overrides(pairs), "an override", config)
    validate(changed)
    return changed


def dump(config: RunConfig) -> str:
    """YAML of every field (also those left at their default), readable by `load`."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def differences(a: RunConfig, b: RunConfig) -> list[str]:
    """Dotted names whose values differ."""
    left, right = dict(flatten(a)), dict(flatten(b))
    return [name for name in left if left[name] != right.get(name)]
