"""What a run logged in `metrics.jsonl`, checked as it is read: figures of studies and adapters are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError
from trace_jax.evaluation import form

# Figures that tables show; a record may lack them, or say null of one that was not finite.
SHOWN = (
    *("tool_calls", "constant_groups", "clip_fraction", "entropy", "full_right"),
    *(f"credit/{name}" for name in ("positive", "std", "reward_correlation", "probe_share")),
)
_RECORD = {"stage": str, "step": float} | {f"{name}?": form.NUMBER for name in SHOWN}
_STEP = {"seconds": float, "reward": float, "trajectories?": float}


def read(path: Path, need: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The records of a run.

    Args:
        path: of the run.
        need: figures that its GRPO steps must have.

    Raises:
        ConfigError: there are none, or a line is no record.
    """
    file, mend = path / "metrics.jsonl", f"restore it, or remove {path} to run it again"
    found = form.read_lines(file, {"stage": str}, mend)
    step = _RECORD | _STEP | dict.fromkeys(need, float)
    forms = {"grpo": step, "validation": _RECORD | {"reward?": form.NUMBER}}
    for number, record in enumerate(found, 1):
        if why := form.fault(record, forms.get(record["stage"], {})):
            raise ConfigError(f"cannot read {file} (line {number}: {why}): {mend}")
    return found


def steps(path: Path, need: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Those of its GRPO steps. ConfigError as `read`."""
    return [record for record in read(path, need) if record["stage"] == "grpo"]
