"""The capability dictionary of the advertising task, with a programmatic labeller for each (arXiv 2604.05336).

What an episode calls for follows from its hidden facts: a campaign-wide cause calls for a comparison of totals, a slice
of two attributes for their intersection. Whether it is there is read from what the agent asked, what it saw and what it
concluded. An attempt that was right for the wrong reasons (the answer without the query) lacks the capability, and one
that was wrong for another reason has it.

The paper's list has late onsets, too. Here nothing asks for them: the question fixes the two halves, the answer has no
place for a day, and every accepted episode shows in halves. Its place is taken by the quoting of evidence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from trace_jax.environments.ads.answer import Answer, parse_lenient
from trace_jax.environments.ads.reading import Pair, Query, Step, read, shown
from trace_jax.environments.capability import Attempt, Capability, Label
from trace_jax.simulator.causes import CAUSES, LEVELS, NO_SIGNAL

NA, PRESENT, LACKING = Label.NA, Label.PRESENT, Label.LACKING
REPEATS = 2  # calls that had been made before, word for word: one is a slip, more are a habit

_CAUSES = {c.name: c for c in CAUSES}
# Metrics of a query that show a feature of a cause's signature.
_SHOWN_BY = {"in_stock": "stock", "mix_placement": "share", "mix_audience": "share", "local": "ctr"}
_QUOTED = re.compile(r"([A-Za-z_]+)\W{1,4}?([-+]?\d+(?:\.\d+)?)(?![\w.]*\w)")


@dataclass(frozen=True)
class Case:
    """An attempt that has been read: what every labeller here needs."""

    attempt: Attempt
    answer: Answer | None
    steps: tuple[Step, ...]

    @staticmethod
    def of(attempt: Attempt) -> Case:
        answer = parse_lenient(attempt.answer) if attempt.answer is not None else None
        return Case(attempt, answer, tuple(read(code, text) for code, text in attempt.steps))

    @property
    def cause(self) -> str:
        """The hidden cause."""
        return str(self.attempt.facts["cause"])

    @property
    def type(self) -> str:
        """The episode's type, one of `causes.EPISODE_TYPES`."""
        return str(self.attempt.facts["type"])

    @property
    def driver(self) -> frozenset[Pair]:
        """The hidden slice."""
        return frozenset((str(a), str(v)) for a, v in self.attempt.facts["driver"])

    @cached_property
    def queries(self) -> list[Query]:
        """Queries of calls that worked."""
        return [q for step in self.steps if step.works for q in step.queries]

    def compared(self, wanted: Callable[[Query], bool], metrics: Iterable[str] = (), noise: bool = True) -> bool:
        """Whether working queries of that kind set the halves against each other, with their noise, in these metrics.

        A comparison may be spread over calls, such as one half in each.
        """
        found = [q for q in self.queries if wanted(q) and q.compares]
        seen = frozenset().union(*(q.metrics for q in found))
        return bool(found) and set(metrics) <= seen and (not noise or any(q.noise for q in found))

    def totals(self, metrics: Iterable[str] = ()) -> bool:
        """Whether the campaign as a whole was compared."""
        return self.compared(lambda q: q.totals and bool(q.metrics), metrics)

    def sliced(self, attributes: frozenset[str]) -> bool:
        """Whether slices by exactly these attributes were compared."""
        return self.compared(lambda q: q.shows(attributes) and bool(q.metrics))

    def heads(self, named: frozenset[Pair]) -> bool:
        """Whether the named slice came first in a result that compared slices."""
        values = frozenset(value for _, value in named)
        for step in self.steps:
            if step.works and any(q.compares and any(q.groups) for q in step.queries):
                first = next((found for found, numbers in step.rows if found and numbers), None)
                if first == values:
                    return True
        return False


def _labeller(judge: Callable[[Case], Label]) -> Callable[[Attempt], Label]:
    def label(attempt: Attempt) -> Label:
        return NA if attempt.ending == "lost" else judge(Case.of(attempt))

    label.__doc__ = judge.__doc__
    return label


def _where(condition: bool) -> Label:
    return PRESENT if condition else LACKING


def _tool_protocol(case: Case) -> Label:
    works = [step.works for step in case.steps]
    broken = case.attempt.ending in ("malformed", "runaway") or (case.attempt.answer is not None and not case.answer)
    return _where(not broken and sum(works) * 2 >= len(works) and (not works or works[-1]))


def _campaign_comparison(case: Case) -> Label:
    if case.type != "campaign" or case.answer is None:
        return NA
    return _where(case.totals() and LEVELS[case.answer.root_cause] == "campaign")


def _mix_decomposition(case: Case) -> Label:
    if case.type != "mix" or case.answer is None:
        return NA
    attribute = frozenset(a for a, _ in case.driver)
    looked = case.compared(lambda q: q.shows(attribute), ["share"], noise=False)
    return _where(looked and LEVELS[case.answer.root_cause] == "mix")


def _located(case: Case) -> Label:
    """Whether it drilled to the depth of the true slice, and named that slice or what its own results put first."""
    named = frozenset(case.answer.driver_segments)
    if len(named) != len(case.driver):
        return LACKING
    return _where(case.sliced(frozenset(a for a, _ in case.driver)) and (named == case.driver or case.heads(named)))


def _drill_down(case: Case) -> Label:
    return NA if case.type != "segment_1d" or case.answer is None else _located(case)


def _intersection(case: Case) -> Label:
    return NA if case.type != "segment_2d" or case.answer is None else _located(case)


def _sibling_causes(case: Case) -> Label:
    if case.answer is None or case.cause == NO_SIGNAL or LEVELS[case.answer.root_cause] != LEVELS[case.cause]:
        return NA
    return _where(case.answer.root_cause == case.cause and features_shown(case) == 1.0)


def features_shown(case: Case) -> float:
    """Share of the metrics that set the true cause apart which were compared where it acts; 1 where none does."""
    says = ("up", "down", "some up", "some down")
    features = [f for f, change in _CAUSES[case.cause].signature.items() if change in says]
    needed = {_SHOWN_BY.get(f, f) for f in features}
    where = {"campaign": lambda q: q.totals, "segment": lambda q: not q.totals}.get(LEVELS[case.cause], lambda q: True)
    seen = frozenset().union(*(q.metrics for q in case.queries if q.compares and where(q)))
    return len(needed & seen) / len(needed) if needed else 1.0


def _abstaining(case: Case) -> Label:
    if case.type != "no_signal" or case.answer is None:
        return NA
    slices = case.compared(lambda q: any(q.groups) and bool(q.metrics))
    return _where(case.answer.root_cause == NO_SIGNAL and case.totals() and slices)


def _stopping(case: Case) -> Label:
    if case.attempt.ending not in ("answered", "exhausted"):
        return NA
    asked = Counter(" ".join(step.code.split()) for step in case.steps)
    again = sum(asked.values()) - len(asked)
    return _where(case.attempt.ending == "answered" and bool(asked) and again < REPEATS)


def _evidence(case: Case) -> Label:
    if case.answer is None or not quotes(case.attempt.answer):
        return NA
    return _where(evidence_shown(case) == 1.0)


def evidence_shown(case: Case) -> float:
    """Share of the numbers quoted as evidence that results show, under the metric they are quoted for; 0 where none is
    quoted."""
    quoted = quotes(case.attempt.answer)
    seen: dict[str, set[float]] = {"": set()}
    for step in case.steps:
        for metric, numbers in shown(step).items() if step.works else ():
            seen.setdefault(metric, set()).update(numbers)
    found = [_printed(number, seen.get(metric.lower(), seen[""])) for metric, number in quoted]
    return sum(found) / len(found) if found else 0.0


def quotes(answer: str | None) -> list[tuple[str, str]]:
    """(word before it, number as written) of every number in the evidence of an answer."""
    said = (answer or "").partition('"evidence"')[2].rpartition('"explanation"')
    return _QUOTED.findall(said[0] or said[2])  # a broken answer may have no explanation


def _printed(number: str, seen: Iterable[float]) -> bool:
    """Whether a number is one of those seen, to the decimals that it is quoted with."""
    places = len(number.partition(".")[2])
    return any(abs(float(number) - x) <= 0.5 * 10**-places for x in seen)


def _entry(name: str, title: str, definition: str, description: str, judge: Callable[[Case], Label]) -> Capability:
    return Capability(name, title, " ".join(definition.split()), description, _labeller(judge))


CAPABILITIES: tuple[Capability, ...] = (
    _entry(
        "tool_protocol",
        "valid SQL and tool protocol",
        """Every task calls for it. There: turns are calls or an answer, calls work or are made good by a later one, the
        answer can be read. Lacking: a turn is neither or never ends, the answer cannot be read, more calls fail than
        work, or the last call fails.""",
        "Writing calls that run and answers that can be read, whatever the question.",
        _tool_protocol,
    ),
    _entry(
        "campaign_comparison",
        "campaign totals against noise",
        """Called for where a campaign-wide cause acted and an answer was given. There: a working query compares the
        campaign's totals before and after with an estimate of their noise, and the answer names a campaign-wide cause,
        the right one or not. Lacking: otherwise.""",
        "Orders, clicks or cost of the whole campaign moved at once, in every slice alike.",
        _campaign_comparison,
    ),
    _entry(
        "mix_decomposition",
        "mix against rate",
        """Called for where the mix of placements or audiences shifted and an answer was given. There: a working query
        compares shares of impressions by the attribute that shifted, and the answer names a mix cause. Lacking:
        otherwise.""",
        "Impressions moved between placements or audiences while rates inside them may not have.",
        _mix_decomposition,
    ),
    _entry(
        "drill_down",
        "one-attribute drill-down",
        """Called for where one value of one attribute changed and an answer was given. There: a working query compares
        slices of that attribute with their noise, and the answer names one attribute: the right value, or the one that
        its own result put first. Lacking: otherwise, also when two attributes are named.""",
        "The click rate fell in one slice only: one placement, device, audience or country.",
        _drill_down,
    ),
    _entry(
        "intersection",
        "two-attribute intersection",
        """Called for where only the intersection of two attributes changed and an answer was given. There: a working
        query compares slices of both attributes at once with their noise, and the answer names two attributes: the
        right ones, or those that its own result put first. Lacking: otherwise, also when one attribute is named.""",
        "The click rate fell only where two attributes meet, such as one device in one country.",
        _intersection,
    ),
    _entry(
        "sibling_causes",
        "telling sibling causes apart",
        """Called for where the answer names a cause of the right kind (campaign, mix, segment). There: it is the right
        one, and the metrics that set it apart were compared where the cause acts: in totals, in slices. Lacking: a
        sibling of it, or a guess without these metrics.""",
        "Several causes look alike and differ in a second metric: cost per click, conversion, share or stock.",
        _sibling_causes,
    ),
    _entry(
        "abstaining",
        "abstaining",
        """Called for where nothing acted and an answer was given. There: totals and slices were compared with their
        noise and the answer is NO_SIGNAL. Lacking: otherwise.""",
        "Changes are small and may be nothing but the usual noise of days and seasons.",
        _abstaining,
    ),
    _entry(
        "stopping",
        "stopping in time",
        """Every task calls for it whose turns can be read. There: an answer after at least one call. Lacking: turns or
        room ran out before an answer, the same call was repeated twice or more, or it answered without a call.""",
        "Answering as soon as the evidence decides, with turns and room to spare.",
        _stopping,
    ),
    _entry(
        "evidence",
        "quoting what was seen",
        """Called for where a readable answer quotes numbers as evidence. There: results of working calls show every one
        of them, under the metric that it is quoted for. Lacking: a number that no result shows.""",
        "The answer must quote figures, and they must be those that the queries returned.",
        _evidence,
    ),
)


def labels_of(attempt: Attempt) -> Mapping[str, Label]:
    """All labels of one attempt."""
    return {c.name: c.label(attempt) for c in CAPABILITIES}
