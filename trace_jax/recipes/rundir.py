"""The run directory: configuration, metrics, checkpoints, trajectories and report of one run.

config.yaml        the resolved configuration
metrics.jsonl      one JSON object a line: stage, step, seconds, and the stage's figures
tensorboard/       the same figures as events, when tensorboardX is installed
wandb/             what W&B keeps here, with --track wandb
profile/           the trace of --profile, for xprof
data/              teacher set (kept so that a resumed run does not repeat it)
tokenizer.model    sentencepiece model (an imported policy: tokenizer.json and its settings)
checkpoints/       sft/, grpo/: the newest `keep_checkpoints` of each; base/: a policy that was not trained here;
                   adapters/: those that a gate mixes
trajectories/      grpo-000010.parquet, ...
evaluation/        one file per evaluated subject
logs/              what each of several processes said
export/            Hugging Face layout
report.html
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trace_jax import config_io, config_rules_policy
from trace_jax.config import ConfigError, RunConfig
from trace_jax.policy.chat_files import tokenizer_files
from trace_jax.recipes import tracking
from trace_jax.recipes.tracking import TensorBoard, Tracker

_SHAPE = {f"policy.{name}" for name in config_rules_policy.SHAPE}
BASE = "base"  # among the checkpoints: a policy that was not trained here
ADAPTERS = "adapters"  # among the checkpoints: what the run's gate mixes


def default_path(config: RunConfig) -> Path:
    """`runs/<config name>-<date>`."""
    return Path("runs") / f"{config.name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Gives errors of the file system the name of the file, which Python leaves out when a write fails.

    Raises:
        ConfigError: no such place can be made, as in /proc.
        OSError: anything else.
    """
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"cannot write {path}: no such file or directory; choose another path") from None
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or errno.EIO), str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Writes a file so that it is either the old or the new one, never half of it; makes its directory."""
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise


def stored_config(path: Path, flag: str = "--run-dir") -> RunConfig:
    """The configuration that a run directory holds.

    Args:
        flag: that the directory was given with.

    Raises:
        ConfigError: there is no run, or its configuration is not whole: defaults in place of what is missing would
            quietly make it another run.
    """
    file = path / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"no run in {path} (no config.yaml there): give the directory of a run with {flag}")
    mend = "restore it or start a new run"
    try:
        config, data = config_io.load(file), config_io.read_yaml(file)
    except ConfigError as error:
        raise ConfigError(f"{file} is damaged ({error}): {mend}") from None
    for name, _ in config_io.flatten(config):
        node: Any = data
        for part in name.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if node is None and not name.startswith(ADDED):
            raise ConfigError(f"{file} is damaged (`{name}` is missing): {mend}")
    return config


def refuse_changes(stored: RunConfig, config: RunConfig, may: tuple[str, ...], command: str) -> None:
    """Refuses fields that a command on a run would not use.

    Args:
        may: beginnings of the names of those that it does.

    Raises:
        ConfigError: the first other one that differs.
    """
    for name in config_io.differences(stored, config):
        if not name.startswith(may):
            shown = ", ".join(f"{n}*" if n.endswith(".") else n for n in may)
            mend = f"only {shown} can" if may else "it uses the configuration of the run, leave it out"
            raise ConfigError(f"`{name}` cannot change in `{command}`: {mend}")


# Fields that runs of earlier versions lack; they did what the defaults say.
ADDED = (
    *(f"rollout.{n}" for n in ("top_k", "top_p", "min_p", "decode_steps", "stale_cache", "tool_queue_seconds")),
    *(f"evaluation.{n}" for n in ("top_k", "top_p", "min_p", "rules", "set")),
    *(f"grpo.{n}" for n in ("baseline", "lost_members", "constant_groups", "resample_limit", "dual_clip")),
    *(f"grpo.{n}" for n in ("old_policy", "correction", "overlong", "kl_estimator", "staleness", "weight_sync")),
    *("grpo.validation_samples", "grpo.keep_best", "grpo.microbatch.buckets", "sft.microbatch.buckets"),
    *("mesh.rollout", "save_in_background", "grpo.turn_credit", "environment.name", "search", "grpo.hints"),
    *("sft.without", "sft.searches", "rollout.weights", "environment.penalty_false_cause"),
    "simulator.verified",
    *("capability", "endpoint", "environment.worlds", "lora", "chat", "rollout.replay_routes"),
    *(f"policy.{n}" for n in ("vocab_size", "rotary_fraction", "attention_gate", "norm_offset", "norm_topk_prob")),
    *(f"policy.{n}" for n in ("mixers", "delta_", "conv_width", "expert", "shared_expert", "param_dtype")),
)

# What may still change when a run is continued: the stage that first uses a field, "" for fields that have no effect
# on results. The longest matching name counts.
STAGES = ("teacher", "tokenizer", "sft", "grpo")
FIRST_USED = {
    "name": "",
    "seed": "sft",
    "keep_checkpoints": "",
    "save_in_background": "",
    "simulator": "teacher",
    "environment": "teacher",
    "search": "teacher",
    "environment.reward_attr": "grpo",
    "environment.reward_full": "grpo",
    "environment.reward_format": "grpo",
    "environment.penalty_false_cause": "grpo",
    "data": "grpo",
    "data.seed": "teacher",
    "tokenizer": "tokenizer",
    "policy": "sft",
    "lora": "sft",
    "chat": "sft",
    "mesh": "sft",
    "sft": "sft",
    "sft.trajectories": "teacher",  # also the size of the teacher's chunks
    "sft.teacher_workers": "",
    "sft.without": "teacher",
    "sft.searches": "teacher",
    "sft.save_every": "",
    "rollout": "grpo",
    "rollout.context": "sft",
    "rollout.max_turns": "sft",
    "rollout.max_turn_tokens": "sft",
    "rollout.tool_workers": "",
    "mesh.rollout_devices": "grpo",
    "mesh.rollout_tensor": "grpo",
    "mesh.rollout_expert": "grpo",
    "grpo": "grpo",
    "grpo.save_every": "",
    "grpo.keep_best": "",
    "grpo.turn_credit.microbatch": "",  # shapes of the probe's batches: its values do not depend on them
    "evaluation": "grpo",
    "capability": "",
    "endpoint": "",
}


def first_used(field: str) -> str:
    """The stage that first uses a field, see `FIRST_USED`."""
    parts = field.split(".")
    return next(FIRST_USED[n] for k in range(len(parts), 0, -1) if (n := ".".join(parts[:k])) in FIRST_USED)


class RunDirectory:
    """An open run directory. One process at a time holds it."""

    def __init__(self, path: Path, config: RunConfig, *, lock: bool = True):
        self.path, self.config = Path(path), config
        self._lock = None
        self._trackers: list[Tracker] | None = None  # None: TensorBoard's writer is made with the first record
        self._start = time.monotonic()
        if not lock:
            return
        self._lock = open(self.path / ".lock", "a+")  # noqa: SIM115 - held until close
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(f"{self.path} is in use by another trace-jax process: wait for it or end it") from None

    @classmethod
    def create(
        cls, path: Path | None, config: RunConfig, prepare: Callable[[RunDirectory], None] | None = None
    ) -> RunDirectory:
        """A new run directory; refuses one that already holds a run.

        Args:
            prepare: puts into it what it begins with. Only then is it a run: where this fails, the same command may be
                given again.
        """
        path = Path(path) if path is not None else default_path(config)
        cls.refuse_taken(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path, config)
            try:
                if prepare is not None:
                    prepare(run)
                run.write_text("config.yaml", config_io.dump(config))
            except BaseException:
                run.__exit__()
                raise
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"--run-dir {path} is not a directory: choose another path") from None
        except OSError as error:
            reason = os.strerror(error.errno or errno.EIO).lower()
            raise ConfigError(f"cannot create run {path}: {reason}; mend that or choose another --run-dir") from None
        return run

    @staticmethod
    def refuse_taken(path: Path) -> None:
        """ConfigError when there is a run in a directory that is to be a new one."""
        if (path / "config.yaml").exists():
            raise ConfigError(f"{path} already holds a run: add --resume to continue it or choose another --run-dir")

    @classmethod
    def open(
        cls, path: Path | None, config: RunConfig | None = None, *, lock: bool = True, flag: str = "--run-dir"
    ) -> RunDirectory:
        """An existing run directory.

        Args:
            config: how to go on, by default as before; it replaces the stored one. Only fields that no stage has used
                yet may differ.
            lock: False for commands that only read the directory.
            flag: that the directory was given with.

        Raises:
            ConfigError: no run there, in use, or a changed field was used already.
        """
        if path is None:
            raise ConfigError("which run? give its directory with --run-dir")
        stored = stored_config(path := Path(path), flag)
        run = cls(path, stored, lock=lock)
        if config is not None and config_io.differences(stored, config):
            try:
                run.refuse_used(config)
            except ConfigError:
                run.__exit__()
                raise
            run.config = config
            run.write_text("config.yaml", config_io.dump(config))
        return run

    def refuse_edited(self, what: str, configured: int, recorded: int) -> None:
        """Refuses to go on with a `config.yaml` that does not agree with a checkpoint.

        Raises:
            ConfigError: it was edited after the stage had begun.
        """
        if configured != recorded:
            raise ConfigError(
                f"{self.path / 'config.yaml'} was edited after training began: {what} is {configured} by it and "
                f"{recorded} by the checkpoint, put it back as it was"
            )

    def refuse_used(self, config: RunConfig) -> None:
        """Refuses to go on with a configuration that differs in what the run has used.

        Raises:
            ConfigError: the field.
        """
        changed, begun = config_io.differences(stored_config(self.path), config), self.begun()
        imported = any(self.checkpoints(BASE).glob("[0-9]*"))
        if fixed := [name for name in changed if imported and name in _SHAPE]:
            raise ConfigError(
                f"`{fixed[0]}` cannot change: {self.path} holds an imported policy of another shape; leave it"
            )
        if used := [name for name in changed if first_used(name) in begun]:
            raise ConfigError(
                f"`{used[0]}` cannot change any more: {first_used(used[0])} of {self.path} was run with it; leave it "
                "as it was or choose another --run-dir (fields of stages that have made no step may change)"
            )

    def begun(self) -> set[str]:
        """Stages that left something that a continued run builds on, and all stages before them."""
        signs = {
            "teacher": (self.path / "data" / "teacher").glob("*.parquet"),
            "tokenizer": (self.path / name for name in tokenizer_files(self.path)),
            # Step 0 is what a run stopped before its first step saves.
            "sft": (p for p in self.checkpoints("sft").glob("[0-9]*") if p.name.strip("0")),
            "grpo": (p for p in self.checkpoints("grpo").glob("[0-9]*") if p.name.strip("0")),
        }
        last = max((i for i, stage in enumerate(STAGES) if any(signs[stage])), default=-1)
        return set(STAGES[: last + 1])

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc) -> None:
        for tracker in self._trackers or ():
            tracker.close(failed=bool(exc and exc[0]))
        if self._lock is not None:
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
        write_text(self.path / name, text)
        return self.path / name

    # Metrics

    def log(self, stage: str, step: int, metrics: dict[str, Any]) -> None:
        """Appends one record; a figure that is not finite becomes null (JSON has no NaN)."""
        record = {"stage": stage, "step": step, "seconds": round(time.monotonic() - self._start, 3)}
        record |= {k: _jsonable(v) for k, v in metrics.items()}
        path = self.path / "metrics.jsonl"
        with writing(path), open(path, "a", encoding="utf-8") as file:  # closed each time: a bucket gets what is closed
            file.write(json.dumps(record) + "\n")
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
        for tracker in self._writers():
            tracker.add(stage, step, numbers)

    def track(self, service: str | None) -> None:
        """Also sends what is logged from now on to a service of `--track`. ConfigError: it cannot be used."""
        tracking.require(service)
        if service is not None:
            self._writers().append(tracking.WandB(self.path, self.config))

    def _writers(self) -> list[Tracker]:
        if self._trackers is None:
            events = TensorBoard.open(self.path / "tensorboard")
            self._trackers = [] if events is None else [events]
        return self._trackers

    def truncate(self, stage: str, step: int) -> None:
        """Drops the records of `stage` above `step`, which a resumed run will write again. A last line cut short by a
        crash goes too; any other damaged line goes with a warning."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return
        content = path.read_bytes()
        lines = content.splitlines(keepends=True)
        kept: list[str] = []
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode()
                record = json.loads(text)
                later = float(record["step"]) > step and record["stage"] == stage
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                if line.strip() and (number < len(lines) or line.endswith(b"\n")):
                    warnings.warn(f"{path} line {number} is damaged and left out", stacklevel=2)
                continue
            if not later:
                kept.append(text.rstrip("\r\n") + "\n")
        if (text := "".join(kept)).encode() != content:
            self.write_text("metrics.jsonl", text)


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    value = value.item() if hasattr(value, "item") else float(value)
    return value if not isinstance(value, float) or math.isfinite(value) else None
