"""Results and graded answers of an agent in a run directory: `evaluation/<agent>.json` and `.jsonl`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from trace_jax.config import ConfigError
from trace_jax.evaluation.metrics import EvalRecord

FOLDER = "evaluation"


def _write(path: Path, text: str) -> None:
    # Written beside and renamed: an interrupted run never leaves half a file that a report would trip over.
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror or e}; free space or choose another --run-dir") from e


def save(run_dir: str | Path, agent: str, summary: dict, records: Sequence[EvalRecord]) -> None:
    """Write the summary (JSON) and the answers (one JSON object a line) of `agent` under `run_dir/evaluation`."""
    folder = Path(run_dir) / FOLDER
    _write(folder / f"{agent}.jsonl", "".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in records))
    _write(folder / f"{agent}.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")


def load_summaries(run_dir: str | Path) -> dict[str, dict]:
    """Summary by agent name, sorted by name; empty when nothing was evaluated yet."""
    result = {}
    for path in sorted((Path(run_dir) / FOLDER).glob("*.json")):
        try:
            result[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise ConfigError(f"cannot read {path}: {e}; delete it and evaluate again") from e
    return result


def load_records(run_dir: str | Path, agent: str) -> list[EvalRecord]:
    """The answers `save` wrote for `agent`."""
    path = Path(run_dir) / FOLDER / f"{agent}.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [EvalRecord(**json.loads(line)) for line in lines if line]
    except (OSError, ValueError, TypeError) as e:
        raise ConfigError(f"cannot read {path}: {e}; evaluate {agent!r} again") from e
