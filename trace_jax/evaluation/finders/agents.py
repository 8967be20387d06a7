"""The finders as agents: two or three queries, a slice, the shared rules, an answer in the contract's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trace_jax.environments.ads.answer import format_answer
from trace_jax.environments.ads.environment import AdsEpisode
from trace_jax.environments.base import Transcript
from trace_jax.evaluation.finders import adtributor, campaign, contribution, quasi, riskloc, rules, squeeze
from trace_jax.evaluation.finders.campaign import Campaign, Pair, Rows
from trace_jax.evaluation.finders.leaves import Element, Leaves, click_rate, pairs

Query = Callable[[str], Rows]
Finder = Callable[[Campaign, Query], tuple[Pair, ...] | None]


def _in_leaves(find: Callable[[Leaves], Element | None]) -> Finder:
    return lambda seen, query: pairs(find(click_rate(seen)))


# Which slice segment causes are considered in; None: every one of them, and the best wins.
FINDERS: Mapping[str, Finder] = {
    "scan": lambda seen, query: None,
    "contribution": lambda seen, query: contribution.choose(query(contribution.SQL)),
    "adtributor": _in_leaves(adtributor.find),
    "squeeze": _in_leaves(squeeze.find),
    "riskloc": _in_leaves(riskloc.find),
}


def investigate(episode: AdsEpisode, name: str, thresholds: Mapping[str, float]) -> Transcript:
    """One finder on one episode. Its tool calls are its queries.

    Args:
        name: of `FINDERS`.
        thresholds: of the shared rules, as they were fitted for this finder.
    """
    steps: list[tuple[str, str]] = []

    def query(sql: str) -> Rows:
        rows = episode.query(sql)
        steps.append((sql, f"{len(rows)} rows"))
        return rows

    seen = campaign.read(query)
    verdict = rules.decide(rules.scores(quasi.scan(seen)), thresholds, FINDERS[name](seen, query))
    evidence = [f"gain over the next best explanation {verdict.margin:.1f}"]
    return Transcript(steps, format_answer(verdict.cause, verdict.driver, evidence), confidence=verdict.margin)


def examples(
    truths: Sequence[tuple[str, tuple[Pair, ...]]],
    query_of: Callable[[int], Query],
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[rules.Example]]:
    """What every finder's rules are fitted on.

    Args:
        truths: cause and driver slice of each training episode.
        query_of: how to query the agent-visible tables of episode i.
    """
    found: dict[str, list[rules.Example]] = {name: [] for name in FINDERS}
    for i, (cause, driver) in enumerate(truths):
        query: Any = query_of(i)
        seen = campaign.read(query)
        gains = rules.scores(quasi.scan(seen))
        for name, finder in FINDERS.items():
            found[name].append(rules.Example(gains, finder(seen, query), cause, driver))
        if on_progress:
            on_progress(i + 1, len(truths))
    return found
