"""Results and graded answers of an agent in a run directory: `evaluation/<agent>.json` and `.jsonl`."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError
from trace_jax.evaluation import form
from trace_jax.evaluation.kinds import KINDS, Kind, kind_of

FOLDER = "evaluation"
_INTERVAL = {"value": form.NUMBER, "low": form.NUMBER, "high": form.NUMBER}
_BENCHMARK = {"sha256": str, "episodes": int, "answers?": (str, None), "totals?": ({str: float}, None)}
# What tables, tests and studies read of a result beside its intervals; results of earlier versions have less.
_RESULT = {
    "settings?": {},
    "benchmark?": (_BENCHMARK, None),
    **{f"{name}?": {} for name in ("by_type", "by_cause", "by_hops")},
    "extra": {
        **dict.fromkeys(("episodes", "samples", "confidence"), float),
        "signal?": (_INTERVAL, None),
        "abstention?": ({"decision?": ([{"no_signal": _INTERVAL, "signal": _INTERVAL}], None)}, None),
    },
}
_CONFUSION = {"extra": {"confusion": {"causes": [str], "predicted": [str], "counts": [[float]]}}}
_READING = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


def _write(path: Path, text: str) -> None:
    # Written beside and renamed: an interrupted run never leaves half a file that a report would trip over.
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror or e}; free space or choose another --run-dir") from e


def save(run_dir: str | Path, agent: str, summary: dict, records: Sequence[Any]) -> None:
    """Write the summary (JSON) and the answers (one JSON object a line) of `agent` under `run_dir/evaluation`."""
    folder = Path(run_dir) / FOLDER
    _write(folder / f"{agent}.jsonl", "".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in records))
    _write(folder / f"{agent}.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")


def load_summaries(run_dir: str | Path, under: str = "") -> dict[str, dict]:
    """Summary by agent name, sorted by name; empty when nothing was evaluated yet.

    Args:
        under: folder of another set of episodes (`evaluation.set`); "": the run's own.

    Raises:
        ConfigError: a file is unreadable or lacks what `metrics.summarise` writes.
    """
    result = {}
    for path in sorted((Path(run_dir) / FOLDER / under).glob("*.json")):
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            _check_summary(summary)
        except _READING as e:
            mend = f"delete it and run `trace-jax eval{f' --set {under}' if under else ''}` again"
            raise ConfigError(f"{path} holds no results ({_reason(e)}): {mend}") from e
        result[path.stem] = summary
    return result


def _check_summary(summary: Any) -> None:
    """Raises one of `_READING` unless tables and reports can be made of it."""
    if not isinstance(summary, dict):
        raise TypeError("not a JSON object")
    kind = kind_of({"": summary})
    _check(summary, _RESULT)
    for name, node in kind.intervals(summary):
        _check(node, _INTERVAL, name)
    for _, path, _ in kind.rows({"": summary}):
        _check_shown(summary, path)
    if not kind.confusion:
        return
    _check(summary, _CONFUSION)
    found = summary["extra"]["confusion"]
    if [len(row) for row in found["counts"]] != [len(found["predicted"])] * len(found["causes"]):
        raise ValueError("extra.confusion is no table")


def _check(value: Any, wanted: Any, where: str = "") -> None:
    if why := form.fault(value, wanted, where):
        raise ValueError(why)


def _check_shown(summary: dict, path: Sequence[str]) -> None:
    """Of a table's cell, which may be empty: an interval at the end of a path, or null on the way there."""
    node: Any = summary
    for i, key in enumerate(path):
        _check(node, ({}, None), ".".join(path[:i]))
        node = (node or {}).get(key)
    _check(node, ({f"{k}?": v for k, v in _INTERVAL.items()}, None), ".".join(path))


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    # What Python says of a wrong type would mean nothing to a reader.
    known = isinstance(error, ValueError) or str(error).startswith("not a JSON")
    return " ".join(str(error).split()) if known else "not of the form that `trace-jax eval` writes"


def _record(line: str, kind: Kind) -> Any:
    record = kind.record(**json.loads(line))
    for name, allowed in typing.get_type_hints(kind.record).items():
        value = getattr(record, name)
        if not isinstance(value, allowed) and not (allowed == float | None and isinstance(value, int)):
            raise ValueError(f"`{name}` is a {type(value).__name__}")
    kind.check_record(record)
    return record


def load_records(run_dir: str | Path, agent: str, kind: Kind = KINDS["ads"], under: str = "") -> list[Any]:
    """The answers `save` wrote for `agent`, records of a kind; `under` as in `load_summaries`.

    Raises:
        ConfigError: the file is missing or one of its lines is no answer.
    """
    path = Path(run_dir) / FOLDER / under / f"{agent}.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [_record(line, kind) for line in lines if line]
    except _READING as e:
        raise ConfigError(
            f"cannot read {path} ({_reason(e)}): run `trace-jax eval` for {agent} again, or delete {agent}.json"
        ) from e
