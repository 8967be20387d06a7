"""Benchmarks: what each stage achieves as a share of what the machine could do at that moment."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_rules import require_environment, shown

MOST_REPEATS = 1000
KINDS = ("sim", "tools", "rollout", "learner", "probe")
ADS = ("sim", "tools")  # of the advertising world
COMPARED = ("rollout", "learner")  # to other programs


def run(kind: str, config: RunConfig, *, repeats: int = 5, peers: str | Path | None = None) -> dict[str, Any]:
    """Run one benchmark at the sizes of `config`.

    Args:
        kind: one of `KINDS`.
        repeats: timed repetitions; medians are reported.
        peers: for "rollout" and "learner", a Python with the packages they are compared to.

    Returns:
        JSON-able: `kind`, `repeats`, `machine`, `sizes` (what was run), `floor` (measured limits of the machine),
        `measured` (rates), `share` (measured over floor, between 0 and about 1). "sim", "rollout" and "learner" add
        their headline figures at the top level and a `table`; a `note` and a `warning`, if any, are for people.

    Raises:
        ConfigError: unknown kind, no repetition, or peers of a kind that has none.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown benchmark {kind!r}: choose one of {', '.join(KINDS)}")
    if not 1 <= repeats <= MOST_REPEATS:
        raise ConfigError(f"--repeats {shown(repeats)}: use between 1 and {MOST_REPEATS}")
    if peers is not None and kind not in COMPARED:
        raise ConfigError(f"bench {kind} is compared to no other program: leave --peers out")
    if kind in ADS:
        require_environment(config, "ads", f"bench {kind}")
    from trace_jax.bench import measure

    # Each benchmark imports its own layer only when it is asked for.
    more = {"peers": peers} if kind in COMPARED else {}
    result = importlib.import_module(f"trace_jax.bench.{kind}").run(config, repeats, **more)
    return {"kind": kind, "repeats": repeats, "machine": measure.machine(), **result}


def text(result: dict[str, Any]) -> str:
    """A result for people: one line a figure, shares in percent."""
    where = result["machine"]
    lines = [f"warning: {result['warning']}"] if "warning" in result else []
    lines += [
        f"{result['kind']} on {where['processor']}, {where['cores']} cores, {where['devices']} x {where['device']}"
    ]
    for section in ("sizes", "floor", "measured"):
        for name, value in result[section].items():
            if isinstance(value, dict):  # seconds of one phase, or of each of several
                phases = value if isinstance(next(iter(value.values())), dict) else {"": value}
                lines += [f"  {f'{name} {p}'.strip():32s} {t['median']:.4g} (median)" for p, t in phases.items()]
            else:
                lines.append(f"  {name:32s} {_figure(value)}")
    lines += [
        f"  {f'share {name}'.replace('_', ' '):32s} {100 * value:.1f} %" for name, value in result["share"].items()
    ]
    for row in result.get("table", ()):
        lines.append("  " + ", ".join(f"{k} {_figure(v)}" for k, v in row.items() if not isinstance(v, dict)))
    if "note" in result:
        lines.append(f"  {result['note']}")
    return "\n".join(lines)


def _figure(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
