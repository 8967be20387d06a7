"""A run directory, or two beside each other, as one self-contained HTML page: results, curves, and every investigation
that was kept, to be looked through.

Every part is left out when its file is not there, so the page of an unfinished run is a page too. Results, curves and a
few investigations are markup that needs no script; the rest is data inside the page that its script unpacks.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from trace_jax import config_io
from trace_jax.config import ChatConfig, ConfigError, RunConfig
from trace_jax.evaluation import store
from trace_jax.evaluation.kinds import KINDS, Kind, kind_of
from trace_jax.evaluation.metrics import UNPARSED
from trace_jax.policy import chat_files
from trace_jax.policy.chat import Chat
from trace_jax.report import browse, curves, recorded, results, svg
from trace_jax.report.packed import finite, pack
from trace_jax.report.subjects import series
from trace_jax.report.target import check_target, put
from trace_jax.report.turns import said
from trace_jax.rollout.trajectory import Trajectory

CASES_PER_TYPE = 1  # right and wrong investigations of each episode type that are shown without a script
LIMIT = 2000  # trajectories of a run
PAGE = Path(__file__).parent / "page"
SCRIPTS = ("data.js", "charts.js", "curves.js", "list.js", "detail.js", "main.js")
# Read with this module: a run may train for days, and its page is made at the end, by the code that it began with.
_FILES = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir() if path.is_file()}


@dataclass(frozen=True)
class _Run:
    """What a page shows of a run directory."""

    name: str
    path: Path
    config: RunConfig | None  # None: damaged
    evaluated: results.Evaluated
    metrics: curves.Metrics
    chat: Chat | None
    recorded: recorded.Recorded


def write(
    run_dir: str | Path,
    out: str | Path | None = None,
    *,
    compare: str | Path | None = None,
    limit: int = LIMIT,
) -> Path:
    """Build the page of `run_dir` and write it to `out` (default `run_dir/report.html`).

    Args:
        compare: a run to show beside it.
        limit: trajectories of each run.

    Raises:
        ConfigError: `run_dir` is no run directory, one of its files is broken, or the page cannot be written.
    """
    target = Path(out) if out is not None else Path(run_dir) / "report.html"
    check_target(target, ours=out is None)
    page = build(run_dir, compare=compare, limit=limit)
    return put(target, page, ours=out is None)


def build(
    run_dir: str | Path,
    *,
    compare: str | Path | None = None,
    limit: int = LIMIT,
) -> str:
    """The page as text."""
    names = _names([Path(run_dir), *([Path(compare)] if compare is not None else [])])
    runs = [_open(path, name, "--compare" if i else "--run-dir", limit) for i, (path, name) in enumerate(names)]
    first, evaluated = runs[0], [run.evaluated for run in runs]
    if len({id(e.kind) for e in evaluated}) > 1:
        raise ConfigError(f"{names[0][0]} and {names[1][0]} are of different environments: compare runs of one")
    index, parts, notes = _trajectories(runs)
    code = "\n".join(_FILES[name] for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{code}\n}})();\n'
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    newest = first.recorded.newest
    tables, unpaired = results.paired(*evaluated) if len(runs) == 2 else ([], [])
    return environment.from_string(_FILES["page.html"]).render(
        names=[run.name for run in runs],
        subtitles=[_subtitle(e) for e in evaluated],
        figures=[results.figures(e) for e in evaluated],
        table=results.held_out(evaluated),
        differences=[(run.name, results.differences(run.evaluated)) for run in runs],
        paired=tables,
        unpaired=unpaired,
        breakdowns=[(run.name, b) for run in runs if (b := results.breakdown(run.evaluated))],
        matrices=[m for e in evaluated if (m := results.matrix(e))],
        failures=[results.failures(e) for e in evaluated],
        stages=_charts(runs),
        phases=[(run.name, run.metrics.phases) for run in runs if run.metrics.phases],
        skipped=[run.metrics.note for run in runs if run.metrics.note],
        recorded=[(run.name, len(run.recorded.shown), run.recorded.total) for run in runs],
        notes=notes,
        cases=_cases(first, first.evaluated.kind),
        cases_from=newest.path.name if newest else "",
        group=first.evaluated.kind.group[0],
        outcomes=first.evaluated.kind.outcomes,
        configs=[(run.name, _text(run.path / "config.yaml")) for run in runs],
        style=_FILES["page.css"],
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        index=pack(index),
        parts=parts,
    )


def _names(paths: list[Path]) -> list[tuple[Path, str]]:
    """Paths with the names that tell them apart."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.resolve().parent.name}/{name}" for path, name in zip(paths, names, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{name} ({letter})" for name, letter in zip(names, "AB", strict=False)]
    return list(zip(paths, names, strict=True))


def _open(path: Path, name: str, flag: str, limit: int) -> _Run:
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"no run in {path} (no config.yaml there): check {flag}")
    config = None
    with contextlib.suppress(ConfigError):  # a damaged file is shown as it is, as one of "ads"
        config = config_io.load(path / "config.yaml")
    agents = store.load_summaries(path)
    kind = kind_of(agents) if agents else KINDS[config.environment.name] if config else KINDS["ads"]
    chat, kept = None, recorded.Recorded([], 0, [])
    if chat_files.tokenizer_files(path) and any((path / "trajectories").glob("*.parquet")):
        chat = chat_files.open_chat(path, config.chat if config else ChatConfig())
        kept = recorded.read(path, chat, config, limit)
    metrics = curves.read(path / "metrics.jsonl")
    return _Run(name, path, config, results.Evaluated(name, path, agents, kind), metrics, chat, kept)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _subtitle(run: results.Evaluated) -> str:
    if run.last is None:
        return "nothing was evaluated yet"
    extra = run.agents[run.last]["extra"]
    return f"{results.label(run.last)} on {extra['episodes']} held-out episodes, {extra['samples']} answers each"


def _charts(runs: list[_Run]) -> list[tuple[str, list[tuple[str, list[dict[str, str]]]]]]:
    """By stage and family (see `curves.family`), of every figure that a run logged at more than one step."""
    drawn = [run.metrics.drawn() for run in runs]
    result = []
    for stage in dict.fromkeys(stage for found in drawn for stage in found):
        families: dict[str, list[dict[str, str]]] = defaultdict(list)
        families[""] = []
        for name in dict.fromkeys(name for found in drawn for name in found.get(stage, {})):
            own = [found.get(stage, {}).get(name) for found in drawn]
            points = [curve.points() if curve else [] for curve in own]
            last = " / ".join("-" if c is None or c.last is None else f"{c.last:.4g}" for c in own)
            chart = svg.line_chart(points[0], title=f"{stage}: {name} by step", beside=points[1] if points[1:] else ())
            families[curves.family(name)].append({"name": name, "last": last, "svg": chart})
        result.append((stage, [(name, charts) for name, charts in families.items() if charts]))
    return result


def _trajectories(runs: list[_Run]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Index (with the curves, too) and parts of the page's data, and what there is to say about them."""
    notes, browsed = [], []
    for number, run in enumerate(runs):
        notes += run.recorded.notes
        found: dict[tuple[str, int], Any] = {}
        for split in ("test", "train"):
            wanted = {
                x.trajectory.task_index: x.trajectory.labels for x in run.recorded.shown if x.source.split == split
            }
            if run.config is None or not wanted:
                continue
            drawn, why = series(run.config, split, wanted, run.path / "data")
            found |= {(split, task): s for task, s in drawn.items()}
            notes += [f"no charts of the {split} episodes of {run.name}, {why}"] if why else []
        kind = run.evaluated.kind
        browsed.append(browse.Run(number, kind, run.chat, run.config, run.recorded.shown, found))
    index, parts, left_out = browse.encode(browsed)
    if left_out:
        notes.append(f"{left_out} more trajectories would have made this page larger than a browser likes to open")
    index["runs"] = [run.name for run in runs]
    index["unread"] = UNPARSED
    index["asked"] = runs[0].evaluated.kind.truth({})[0]
    index["outcomes"] = list(runs[0].evaluated.kind.outcomes)
    index["curves"] = [
        {stage: {name: c.thinned() for name, c in named.items()} for stage, named in run.metrics.drawn().items()}
        for run in runs
    ]
    return index, parts, notes


def _cases(run: _Run, kind: Kind) -> list[dict[str, Any]]:
    """A right and a wrong investigation of each episode type: of the best agent evaluated, else of the newest step."""
    chosen: dict[tuple[str, bool], list[Trajectory]] = defaultdict(list)
    for shown in run.recorded.shown:
        t = shown.trajectory
        if shown.source != run.recorded.newest:
            continue
        group = chosen[(str(t.labels.get("type")), bool(t.info.get("full_right")))]
        if len(group) < CASES_PER_TYPE and all(t.task_index != other.task_index for other in group):
            group.append(t)
    cases = []
    for name in kind.types or sorted({name for name, _ in chosen}):
        for right in (True, False):
            for t in chosen[(name, right)]:
                graded = browse.graded(t, kind)
                cases.append(
                    {
                        "index": t.task_index,
                        "type": name,
                        "truth": graded.truth,
                        "where": graded.where,
                        "right": right,
                        "outcome": graded.outcome,
                        "reward": f"{finite(t.reward, 3) or 0:.2f}",
                        "turns": said(t, run.chat) if run.chat else [],
                    }
                )
    return cases
