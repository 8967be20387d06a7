"""The run directory: configuration, metrics, checkpoints, trajectories and report of one run.

config.yaml        the resolved configuration
metrics.jsonl      one JSON object a line: stage, step, seconds, and the stage's figures
tensorboard/       the same figures as events, when tensorboardX is installed
data/              teacher set (kept so that a resumed run does not repeat it)
tokenizer.model    sentencepiece model
checkpoints/       sft/, grpo/: the newest `keep_checkpoints` of each
trajectories/      grpo-000010.parquet, ...
evaluation/        one file per evaluated subject
export/            Hugging Face layout
report.html
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig


def default_path(config: RunConfig) -> Path:
    """`runs/<config name>-<date>`."""
    return Path("runs") / f"{config.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


class RunDirectory:
    """An open run directory. One process at a time holds it."""

    def __init__(self, path: Path, config: RunConfig):
        self.path, self.config = Path(path), config
        self._lock = open(self.path / ".lock", "a+")  # noqa: SIM115 - held until close
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(f"{self.path} is in use by another trace-jax process: wait for it or end it") from None
        self._metrics = None
        self._events = _event_writer(self.path / "tensorboard")
        self._start = time.monotonic()

    @classmethod
    def create(cls, path: Path | None, config: RunConfig) -> RunDirectory:
        """A new run directory; refuses one that already holds a run."""
        path = Path(path) if path is not None else default_path(config)
        if (path / "config.yaml").exists():
            raise ConfigError(f"{path} already holds a run: add --resume to continue it or choose another --run-dir")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"--run-dir {path} is not a directory: choose another path") from None
        run = cls(path, config)
        run.write_text("config.yaml", config_io.dump(config))
        return run

    @classmethod
    def open(cls, path: Path | None, config: RunConfig | None = None) -> RunDirectory:
        """An existing run directory; a `config` given with it must be the one it was started with."""
        if path is None:
            raise ConfigError("which run? give its directory with --run-dir")
        path = Path(path)
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"no run in {path} (no config.yaml there): check --run-dir")
        stored = config_io.load(path / "config.yaml")
        if config is not None and (changed := config_io.differences(stored, config)):
            raise ConfigError(
                f"{path} was started with another configuration ({', '.join(changed[:4])} differ): "
                "resume without --config and overrides, or choose another --run-dir"
            )
        return cls(path, stored)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc) -> None:
        if self._metrics is not None:
            # Nothing is lost: every record was already written and synced by `log`.
            with contextlib.suppress(OSError):
                self._metrics.close()
        if self._events is not None:
            self._events.close()
        self._lock.close()

    # Paths

    def checkpoints(self, stage: str) -> Path:
        """Directory of a stage's checkpoints."""
        return self.path / "checkpoints" / stage

    def trajectories(self, stage: str, step: int) -> Path:
        """Parquet file of the trajectories collected at a step."""
        folder = self.path / "trajectories"
        folder.mkdir(exist_ok=True)
        return folder / f"{stage}-{step:06d}.parquet"

    def folder(self, name: str) -> Path:
        """A subdirectory, made when missing."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write_text(self, name: str, text: str) -> Path:
        """Writes a file so that it is either the old or the new one, never half of it."""
        target = self.path / name
        partial = target.with_name(f".{target.name}.partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
        return target

    # Metrics

    def log(self, stage: str, step: int, metrics: dict[str, Any]) -> None:
        """Appends one record; a figure that is not finite becomes null (JSON has no NaN)."""
        record = {"stage": stage, "step": step, "seconds": round(time.monotonic() - self._start, 3)}
        record |= {k: _jsonable(v) for k, v in metrics.items()}
        if self._metrics is None:
            self._metrics = open(self.path / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        if self._events is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name not in ("step", "stage"):
                    self._events.add_scalar(f"{stage}/{name}", value, step)

    def truncate(self, stage: str, step: int) -> None:
        """Drops the records that a resumed run will write again: everything from the first record of `stage` whose
        step is above `step`. A last line cut short by a crash goes too."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        kept: list[str] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            if record["stage"] == stage and record["step"] > step:
                break
            kept.append(line + "\n")
        self.write_text("metrics.jsonl", "".join(kept))


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    value = value.item() if hasattr(value, "item") else float(value)
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _event_writer(path: Path):
    """A TensorBoard writer, or None without tensorboardX (extra `track`)."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(path))
