"""Where figures go beside `metrics.jsonl`: TensorBoard events, Weights & Biases. Both are extras (`track`)."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig

SERVICES = ("wandb",)  # of `--track`


class Tracker(Protocol):
    """Takes the figures of a step."""

    def add(self, stage: str, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


def require(service: str | None) -> None:
    """Refuses a service whose package is missing, before anything runs.

    Raises:
        ConfigError: how to install it.
    """
    if service is not None and importlib.util.find_spec(service) is None:
        raise ConfigError(
            f"--track {service} needs the package {service}: `pip install {service}` or leave the flag out "
            "(metrics.jsonl has the same figures)"
        )


class TensorBoard:
    """Events under `tensorboard/` of the run directory."""

    def __init__(self, writer: Any):
        self._writer = writer

    @classmethod
    def open(cls, path: Path) -> TensorBoard | None:
        """None without tensorboardX."""
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            return None
        return cls(SummaryWriter(str(path)))

    def add(self, stage: str, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"{stage}/{name}", value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run that belongs to the run directory: continuing the one continues the other.

    Project, entity, mode and server are wandb's own environment variables (WANDB_PROJECT, default trace-jax;
    WANDB_MODE=offline needs no network and keeps everything in `wandb/` of the run directory).
    """

    def __init__(self, path: Path, config: RunConfig):
        """Raises:
        ConfigError: what W&B says when no run can be begun (no login, no network).
        """
        import wandb

        place = path.resolve()
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "trace-jax",
                dir=str(place),
                name=place.name,
                id=hashlib.sha256(str(place).encode()).hexdigest()[:16],
                resume="allow",
                config=dict(config_io.flatten(config)),
            )
        except Exception as error:
            said = " ".join(str(error).split())
            raise ConfigError(
                f"--track wandb: {said} Log in with `wandb login` or set WANDB_MODE=offline, and continue {path} with "
                "--resume"
            ) from error
        self._stages: set[str] = set()
        self._lost = False

    def add(self, stage: str, step: int, figures: Mapping[str, float]) -> None:
        with self._optional():
            if stage not in self._stages:  # each stage counts its own steps; a resumed one writes some again
                self._stages.add(stage)
                self._run.define_metric(f"{stage}/step")
                self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in figures.items()}})

    def close(self, failed: bool) -> None:
        with self._optional():
            self._run.finish(exit_code=int(failed))

    @contextlib.contextmanager
    def _optional(self) -> Iterator[None]:
        """A run does not end because its onlookers went away."""
        try:
            yield
        except Exception as error:
            if not self._lost:
                said = " ".join(str(error).split())
                warnings.warn(f"W&B takes no more figures ({said}); metrics.jsonl has them all", stacklevel=4)
            self._lost = True
