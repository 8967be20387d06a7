"""A run directory as one self-contained HTML page: results, confusion matrix, curves, investigations, configuration.

Every part is left out when its file is not there, so the page of an unfinished run is a page too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import warnings
from collections import defaultdict
from pathlib import Path

import jinja2
import numpy as np

from trace_jax import config_io
from trace_jax.config import ChatConfig, ConfigError, EvaluationConfig
from trace_jax.evaluation import store, table
from trace_jax.evaluation.kinds import KINDS, Kind, kind_of
from trace_jax.policy import chat_files
from trace_jax.policy.chat import Chat
from trace_jax.report import svg
from trace_jax.report.target import check_target, put
from trace_jax.report.template import PAGE
from trace_jax.rollout.trajectory import Trajectory, read_parquet

CASES_PER_TYPE = 1  # right and wrong investigations shown of each episode type
_NOT_CURVES = {"stage", "step"}
_DRAWABLE = 1e100  # beyond it the arithmetic of a chart overflows


def write(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Build the page of `run_dir` and write it to `out` (default `run_dir/report.html`).

    Raises:
        ConfigError: `run_dir` is no run directory, one of its files is broken, or the page cannot be written.
    """
    target = Path(out) if out is not None else Path(run_dir) / "report.html"
    check_target(target, ours=out is None)
    return put(target, build(run_dir), ours=out is None)


def build(run_dir: str | Path) -> str:
    """The page as text."""
    run_dir = Path(run_dir)
    config_file = run_dir / "config.yaml"
    if not config_file.is_file():
        raise ConfigError(f"no run in {run_dir} (no config.yaml there): check --run-dir")
    agents = store.load_summaries(run_dir)
    kind = kind_of(agents) if agents else _kind_of_run(config_file)
    last = _last_agent(agents)
    cases, cases_from = _cases(run_dir, kind)
    stages, skipped = _stages(run_dir / "metrics.jsonl")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(PAGE).render(
        name=run_dir.resolve().name,
        subtitle=_subtitle(agents, last),
        figures=_figures(agents[last], kind) if last else [],
        table=table.build(agents) if agents else None,
        differences=_differences(run_dir, agents, kind),
        breakdown=_breakdown(agents, kind),
        matrix=_matrix(last, agents[last]) if last and kind.confusion else None,
        stages=stages,
        skipped=skipped,
        cases=cases,
        cases_from=cases_from,
        config=config_file.read_text(encoding="utf-8", errors="replace"),
    )


def _last_agent(agents: dict[str, dict]) -> str | None:
    """The trained agent that the headline is about."""
    for name in reversed(table.LABELS):
        if name in agents:
            return name
    return next(iter(agents), None)


def _subtitle(agents: dict[str, dict], last: str | None) -> str:
    if last is None:
        return "trace-jax run"
    extra = agents[last]["extra"]
    return f"{table.LABELS.get(last, last)} on {extra['episodes']} held-out episodes, {extra['samples']} answers each"


def _figures(summary: dict, kind: Kind) -> list[dict[str, str]]:
    chosen = {label: functools.reduce(operator.getitem, path, summary) for label, path in kind.figures}
    return [
        {
            "label": label,
            "value": f"{c['value']:.3g}",
            "detail": "" if c["low"] is None else f"{c['low']:.3g} to {c['high']:.3g}",
        }
        for label, c in chosen.items()
        if c["value"] is not None
    ]


def _differences(run_dir: Path, agents: dict[str, dict], kind: Kind) -> list[str]:
    """One sentence for each pair of successive stages: what the headline metric gained on the same episodes."""
    notes = []
    rivals = ((name, "grpo") for name in (*kind.agents, *kind.rivals))
    for first, second in (("untrained", "sft"), ("sft", "grpo"), *rivals):
        if first not in agents or second not in agents:
            continue
        pair = [store.load_records(run_dir, name, kind) for name in (first, second)]
        change = kind.difference(*pair, EvaluationConfig())
        if change["value"] is not None:
            notes.append(
                f"{table.LABELS[second]} minus {table.LABELS[first]}, {kind.headline} on the same episodes: "
                f"{change['value']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]"
            )
    return notes


def _breakdown(agents: dict[str, dict], kind: Kind) -> dict | None:
    if not agents or kind.breakdown is None:
        return None
    names = [n for n in table.LABELS if n in agents] + [n for n in agents if n not in table.LABELS]
    category, entry = kind.breakdown

    def cell(node: dict) -> tuple[str, float]:
        return ("-", 0.0) if node["value"] is None else (f"{node['value']:.2f}", round(node["value"] * 0.5, 3))

    rows = [(c, [cell(agents[n][entry][c]) for n in names]) for c in agents[names[0]][entry]]
    return {
        "title": f"{kind.headline} by {category}",
        "category": category,
        "columns": [table.LABELS.get(n, n) for n in names],
        "rows": rows,
    }


def _matrix(agent: str, summary: dict) -> dict:
    found = summary["extra"]["confusion"]
    rows = []
    for cause, counts in zip(found["causes"], found["counts"], strict=True):
        total = sum(counts)
        cells = []
        for predicted, count in zip(found["predicted"], counts, strict=True):
            share = count / total if total else 0.0
            cells.append((f"{share:.2f}" if count else "", round(share * 0.7, 3), predicted == cause and count > 0))
        rows.append({"cause": cause, "cells": cells, "total": total})
    return {"agent": table.LABELS.get(agent, agent), "columns": found["predicted"], "rows": rows}


def _flatten(record: dict, prefix: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[prefix + key] = float(value) if abs(value) < _DRAWABLE else math.nan
        elif value is None:
            flat[prefix + key] = math.nan  # a gap, not a missing curve
    return flat


def _stages(path: Path) -> tuple[list[tuple[str, list[dict]]], str]:
    """Charts of every figure that was logged at more than one step, by stage in order of appearance; and a note about
    lines that are no records (empty when there are none)."""
    curves: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    data = path.read_bytes() if path.is_file() else b""
    broken = []
    lines = data.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            stage, step = str(record["stage"]), float(record["step"])
            if not abs(step) < 2**53:
                raise ValueError("step")
            figures = _flatten({k: v for k, v in record.items() if k not in _NOT_CURVES})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            if line.strip() and (number < len(lines) or data.endswith(b"\n")):  # else: cut short by a crash
                broken.append(number)
            continue
        for name, value in figures.items():
            curves[stage][name].append((step, value))
    note = ""
    if broken:
        note = f"skipped {len(broken)} lines of {path.name} that are no records (the first is line {broken[0]})"
        warnings.warn(note, stacklevel=2)
    result = []
    for stage, named in curves.items():
        charts = []
        for name, points in named.items():
            finite = [y for _, y in points if math.isfinite(y)]
            if len(points) > 1 and finite:
                drawn = svg.line_chart(points, title=f"{stage}: {name} by step")
                charts.append({"name": name, "last": f"{finite[-1]:.4g}", "svg": drawn})
        if charts:
            result.append((stage, charts))
    return result, note


def turns(trajectory: Trajectory, chat: Chat) -> list[tuple[str, str, bool]]:
    """`(role, text, sampled)` of each stretch of a trajectory: prompt, then calls, results and the answer."""
    mask, turn = np.asarray(trajectory.loss_mask), np.asarray(trajectory.turn_index)
    starts = np.flatnonzero(np.r_[True, (mask[1:] != mask[:-1]) | (turn[1:] != turn[:-1])])
    result = []
    for start, end in zip(starts, [*starts[1:], len(mask)], strict=True):
        ids = [int(i) for i in trajectory.ids[start:end]]
        if mask[start]:
            said = chat.parse_turn(ids)
            result.append((said.kind, said.text.strip(), True))
        else:
            result += [(role, text.strip(), False) for role, text in chat.given(ids)]
    return [entry for entry in result if entry[1]]


def _kind_of_run(config_file: Path) -> Kind:
    """Of a run in which nothing was evaluated yet; a damaged file is shown as it is, as one of "ads"."""
    with contextlib.suppress(ConfigError):
        return KINDS[config_io.load(config_file).environment.name]
    return KINDS["ads"]


def _chat_config(config_file: Path) -> ChatConfig:
    """Of a run; a damaged file is shown as it is, with the usual settings."""
    with contextlib.suppress(ConfigError):
        return config_io.load(config_file).chat
    return ChatConfig()


def _cases(run_dir: Path, kind: Kind) -> tuple[list[dict], str]:
    """A right and a wrong investigation of each episode type: of the best agent evaluated, else the newest ones."""
    files = sorted((run_dir / "trajectories").glob("*.parquet"), key=lambda p: (p.stat().st_mtime, p.name))
    evaluated = [f for stage in ("untrained", "sft", "grpo") for f in files if f.stem == stage]
    files += evaluated[-1:]
    names = chat_files.tokenizer_files(run_dir)
    if not files or not names:
        return [], ""
    chat = chat_files.open_chat(run_dir, _chat_config(run_dir / "config.yaml"))
    chosen: dict[tuple[str, bool], list[Trajectory]] = defaultdict(list)
    # A model imported with its tokenizer may have more rows than that has tokens.
    size = chat.tokenizer.vocab_size if names[0] == chat_files.SENTENCEPIECE else math.inf
    for t in read_parquet(files[-1]):
        if len(t) and not 0 <= t.ids.min() <= t.ids.max() < size:
            raise ConfigError(f"{files[-1]} was written with another tokenizer than {run_dir / names[0]}: delete it")
        group = chosen[(str(t.labels.get("type")), bool(t.info.get("full_right")))]
        if len(group) < CASES_PER_TYPE and all(t.task_index != other.task_index for other in group):
            group.append(t)
    cases = []
    for name in kind.types or sorted({name for name, _ in chosen}):
        for right in (True, False):
            for t in chosen[(name, right)]:
                outcome = "right" if right else "wrong" if t.status == "finished" else t.status
                asked, truth, where = kind.truth(t.labels)
                cases.append(
                    {
                        "index": t.task_index,
                        "type": name,
                        "asked": asked,
                        "truth": truth,
                        "where": where,
                        "right": right,
                        "outcome": outcome,
                        "reward": f"{t.reward:.2f}",
                        "turns": turns(t, chat),
                    }
                )
    return cases, files[-1].name
