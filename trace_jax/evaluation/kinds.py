"""The kinds of results, one for each environment: how an answer is recorded, measured, checked and shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trace_jax.config import ConfigError
from trace_jax.evaluation import metrics, search_metrics
from trace_jax.simulator.causes import EPISODE_TYPES

Row = tuple[str, tuple[str, ...], int]  # label, path into a result, decimals


@dataclass(frozen=True)
class Kind:
    """Results of one environment.

    Attributes:
        record, record_of, check_record: the type of a graded answer; made of labels and info; refused with ValueError.
        summarise, difference: result of one agent; second minus first agent on the same episodes.
        intervals: (name, interval) of everything in a result.
        rows: of a table of agents.
        agents: names of its agents without a policy that every run scores.
        rivals: names of those that are scored when asked for.
        headline: name of the main metric.
        figures: (label, path into a result) of the page's large numbers.
        breakdown: title, and entry of a result with the main metric by category; None: none beyond the table.
        confusion: whether a result holds a confusion matrix.
        in_paper: whether the columns of arXiv 2609.10315 stand beside it.
        types: task types in the order in which attempts are shown; (): by name.
        truth: (what it is, its value, where) of a task, from its labels.
        group: what answers are counted by, and its value of a record.
        outcomes: what can become of an answer, best first; outcome: which of them a record is.
        answered: (value, where) of what a record says was answered, as `truth` puts them; empty where it is not kept.
    """

    record: type
    record_of: Callable[..., Any]
    check_record: Callable[[Any], None]
    summarise: Callable[..., dict[str, Any]]
    difference: Callable[..., dict[str, float | None]]
    intervals: Callable[[Mapping[str, Any]], Iterator[tuple[str, Any]]]
    rows: Callable[[Mapping[str, Mapping[str, Any]]], tuple[Row, ...]]
    agents: tuple[str, ...]
    rivals: tuple[str, ...]
    headline: str
    figures: tuple[tuple[str, tuple[str, ...]], ...]
    breakdown: tuple[str, str] | None
    confusion: bool
    in_paper: bool
    types: tuple[str, ...]
    truth: Callable[[Mapping[str, Any]], tuple[str, str, str]]
    group: tuple[str, Callable[[Any], str]]
    outcomes: tuple[str, ...]
    outcome: Callable[[Any], str]
    answered: Callable[[Any], tuple[str, str]]


def _cause(labels: Mapping[str, Any]) -> tuple[str, str, str]:
    driver = labels.get("driver") or []
    where = driver if isinstance(driver, str) else " & ".join("=".join(pair) for pair in driver)
    return "hidden cause", labels.get("cause", "unknown"), where


KINDS: dict[str, Kind] = {
    "ads": Kind(
        record=metrics.EvalRecord,
        record_of=metrics.record_of,
        check_record=metrics.check_record,
        summarise=metrics.summarise,
        difference=metrics.paired_difference,
        intervals=metrics.intervals,
        rows=lambda agents: metrics.ROWS,
        agents=("analyst",),
        rivals=("contribution", "adtributor", "squeeze", "riskloc", "scan", "ceiling"),
        headline="FullAttr@1",
        figures=(
            ("FullAttr@1", ("full_attr_at_1",)),
            ("2-D slices", ("by_type", "segment_2d")),
            ("no-signal", ("no_signal",)),
            ("parsed", ("parsed",)),
            ("tool calls", ("tool_calls",)),
        ),
        breakdown=("cause", "by_cause"),
        confusion=True,
        in_paper=True,
        types=tuple(EPISODE_TYPES),
        truth=_cause,
        group=("cause", lambda record: record.cause),
        outcomes=metrics.OUTCOMES,
        outcome=metrics.outcome,
        answered=lambda record: (record.predicted or metrics.UNPARSED, record.driver or ""),
    ),
    "search": Kind(
        record=search_metrics.SearchRecord,
        record_of=search_metrics.record_of,
        check_record=search_metrics.check_record,
        summarise=search_metrics.summarise,
        difference=search_metrics.paired_difference,
        intervals=search_metrics.intervals,
        rows=search_metrics.rows,
        agents=("explorer", "solver"),
        rivals=(),
        headline="Right@1",
        figures=(
            ("Right@1", ("right_at_1",)),
            ("Right@5", ("right_at_5",)),
            ("parsed", ("parsed",)),
            ("tool calls", ("tool_calls",)),
        ),
        breakdown=None,
        confusion=False,
        in_paper=False,
        types=(),
        truth=lambda labels: ("answer", labels.get("answer", "unknown"), ""),
        group=("hops", lambda record: str(record.hops)),
        outcomes=search_metrics.OUTCOMES,
        outcome=search_metrics.outcome,
        answered=lambda record: ("", ""),
    ),
}


def kind_of(results: Mapping[str, Mapping[str, Any]]) -> Kind:
    """The kind of the results of some agents, of "ads" without any.

    Raises:
        ConfigError: they are of several environments, or of one that is not known.
    """
    found = {str(result.get("environment", "ads")) for result in results.values()} or {"ads"}
    if len(found) > 1 or not found <= KINDS.keys():
        raise ConfigError(f"results of environment {', '.join(sorted(found))}: show those of one known environment")
    return KINDS[found.pop()]
