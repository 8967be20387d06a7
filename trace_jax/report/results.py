"""What a page says about held-out results: headline, table, differences, confusion, and what became of the answers."""

from __future__ import annotations

import functools
import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError, EvaluationConfig
from trace_jax.evaluation import compare, store, table
from trace_jax.evaluation import paper as reported
from trace_jax.evaluation.kinds import KINDS, Kind
from trace_jax.evaluation.metrics import UNPARSED
from trace_jax.evaluation.table import ResultTable


@dataclass(frozen=True)
class Evaluated:
    """Results of a run by agent. `name`: of the run, on a page of two."""

    name: str
    path: Path
    agents: dict[str, dict]
    kind: Kind

    @property
    def last(self) -> str | None:
        """The trained agent that the headline is about."""
        return next((a for a in reversed(table.LABELS) if a in self.agents), next(iter(self.agents), None))


def label(agent: str) -> str:
    """An agent as people read it."""
    return table.LABELS.get(agent, agent)


def figures(run: Evaluated) -> list[dict[str, str]]:
    """The large numbers of its last agent."""
    if run.last is None:
        return []
    summary = run.agents[run.last]
    chosen = {name: functools.reduce(operator.getitem, path, summary) for name, path in run.kind.figures}
    return [
        {
            "label": name,
            "value": f"{c['value']:.3g}",
            "detail": "" if c["low"] is None else f"{c['low']:.3g} to {c['high']:.3g}",
        }
        for name, c in chosen.items()
        if c["value"] is not None
    ]


def held_out(runs: Sequence[Evaluated]) -> ResultTable | None:
    """The table of one run, or the tables of two beside each other; None where nothing was evaluated."""
    known = [run for run in runs if run.agents]
    built = [table.build(run.agents, paper=run is known[-1]) for run in known]
    if len(built) < 2:
        return built[0] if built else None
    # The same agent of both runs side by side, then what only one of them has; the paper last.
    shown = [(c, run.name, i) for run, one in zip(known, built, strict=True) for i, c in enumerate(one.columns)]
    paper = [x for x in shown if x[0] in reported.LABELS.values()]
    names = list(dict.fromkeys(x[0] for x in shown if x not in paper))
    place = [label(agent) for agent in table.LABELS]
    names.sort(key=lambda c: place.index(c) if c in place else len(place))
    order = [x for name in names for x in shown if x[0] == name and x not in paper] + paper
    cells = {run.name: dict(one.rows) for run, one in zip(known, built, strict=True)}
    rows = [
        (row, tuple(cells[run][row][i] if row in cells[run] else "-" for _, run, i in order))
        for row in dict.fromkeys(row for one in built for row, _ in one.rows)
    ]
    columns = tuple(c if (c, run, i) in paper else f"{c}, {run}" for c, run, i in order)
    notes = tuple(dict.fromkeys(note for one in built for note in one.notes))
    return ResultTable(columns, tuple(rows), notes, built[0].title)


def differences(run: Evaluated) -> list[str]:
    """One sentence for each pair of successive stages: what the headline metric gained on the same episodes."""
    notes = []
    rivals = ((name, "grpo") for name in (*run.kind.agents, *run.kind.rivals))
    for first, second in (("untrained", "sft"), ("sft", "grpo"), *rivals):
        if first not in run.agents or second not in run.agents:
            continue
        pair = [store.load_records(run.path, name, run.kind) for name in (first, second)]
        change = run.kind.difference(*pair, EvaluationConfig())
        if change["value"] is not None:
            notes.append(
                f"{label(second)} minus {label(first)}, {run.kind.headline} on the same episodes: "
                f"{change['value']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]"
            )
    return notes


def paired(first: Evaluated, second: Evaluated) -> tuple[list[ResultTable], list[str]]:
    """`second` against `first`, agent by agent: tables of paired differences, and why there are none."""
    tables, notes = [], []
    shared = [agent for agent in reversed(table.LABELS) if agent in first.agents and agent in second.agents]
    trained = [agent for agent in shared if agent in ("grpo", "sft", "untrained")]
    for agent in trained:
        try:
            verified = compare.check_benchmark(first.agents[agent], second.agents[agent])
            pair = [store.load_records(run.path, agent, run.kind) for run in (first, second)]
            tables.append(_paired(pair, first, second, agent, verified))
        except ConfigError as error:
            notes.append(f"{label(agent)}: {error}")
    if not trained:
        notes.append("No agent was evaluated in both runs.")
    return tables, notes


def _paired(pair: list[list], first: Evaluated, second: Evaluated, agent: str, verified: bool) -> ResultTable:
    names = (first.name, second.name)
    if first.kind is KINDS["ads"]:
        found = {**compare.compare(*pair, EvaluationConfig()), "verified": verified}
        built = compare.table(found, names)
        return ResultTable(built.columns, built.rows, built.notes, label(agent))
    if {r.index for r in pair[0]} != {r.index for r in pair[1]}:
        raise ConfigError("cannot compare answers to different questions: evaluate both on one split of one data.seed")
    change = first.kind.difference(*pair, EvaluationConfig())
    means = [f"{sum(r.right for r in side) / len(side):.3f}" for side in pair]
    gained = f"{change['value']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]"
    notes = () if verified else (compare.UNVERIFIED,)
    return ResultTable((*names, "difference"), ((first.kind.headline, (*means, gained)),), notes, label(agent))


def breakdown(run: Evaluated) -> dict[str, Any] | None:
    """The main metric by category and agent."""
    if not run.agents or run.kind.breakdown is None:
        return None
    names = [n for n in table.LABELS if n in run.agents] + [n for n in run.agents if n not in table.LABELS]
    category, entry = run.kind.breakdown

    def cell(node: dict) -> tuple[str, float]:
        return ("-", 0.0) if node["value"] is None else (f"{node['value']:.2f}", round(node["value"] * 0.5, 3))

    rows = [(c, [cell(run.agents[n][entry][c]) for n in names]) for c in run.agents[names[0]][entry]]
    return {
        "title": f"{run.kind.headline} by {category}",
        "category": category,
        "columns": [label(n) for n in names],
        "rows": rows,
    }


def matrix(run: Evaluated) -> dict[str, Any] | None:
    """Confusion matrix of the last agent."""
    if run.last is None or not run.kind.confusion:
        return None
    found = run.agents[run.last]["extra"]["confusion"]
    rows = []
    for cause, counts in zip(found["causes"], found["counts"], strict=True):
        total = sum(counts)
        cells = []
        for predicted, count in zip(found["predicted"], counts, strict=True):
            share = count / total if total else 0.0
            cells.append((f"{share:.2f}" if count else "", round(share * 0.7, 3), predicted == cause and count > 0))
        rows.append({"cause": cause, "cells": cells, "total": total})
    return {"run": run.name, "agent": label(run.last), "columns": found["predicted"], "rows": rows}


def failures(run: Evaluated) -> tuple[dict[str, Any] | None, str]:
    """What became of the last agent's answers, by what they are grouped by (the hidden cause, the hops): a table, worst
    row first, or None and why (empty: nothing was evaluated).

    Each row has its answers, `right`, and `parts`: (outcome, answers, share of the row) of every other outcome.
    """
    if run.last is None:
        return None, ""
    try:
        records = store.load_records(run.path, run.last, run.kind)
    except ConfigError as error:
        return None, str(error)
    title, group_of = run.kind.group
    groups: dict[str, list[Any]] = defaultdict(list)
    for r in records:
        groups[str(group_of(r))].append(r)
    rows = []
    for name, members in groups.items():
        count = Counter(run.kind.outcome(r) for r in members)
        wrong = Counter(run.kind.answered(r)[0] for r in members if run.kind.outcome(r) != run.kind.outcomes[0])
        often = [(answer, n) for answer, n in wrong.most_common() if answer not in ("", UNPARSED, name)][:2]
        rows.append(
            {
                "name": name,
                "answers": len(members),
                "right": count[run.kind.outcomes[0]] / len(members),
                "parts": [(o, count[o], count[o] / len(members)) for o in run.kind.outcomes],
                "instead": ", ".join(f"{answer} {n}" for answer, n in often),
            }
        )
    rows.sort(key=lambda row: (row["right"], row["name"]))
    total = Counter(run.kind.outcome(r) for r in records)
    return {
        "run": run.name,
        "agent": label(run.last),
        "title": title,
        "outcomes": [(o, i, total[o]) for i, o in enumerate(run.kind.outcomes) if total[o]],
        "instead": any(row["instead"] for row in rows),
        "rows": rows,
    }, ""
