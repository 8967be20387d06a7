"""The finders as agents: two or three queries, a slice, the shared rules, an answer in the contract's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trace_jax.environments.ads.answer import format_answer
from trace_jax.environments.ads.environment import AdsEpisode
from trace_jax.environments.base import Transcript
from trace_jax.evaluation.finders import adtributor, campaign, contribution, quasi, riskloc, rules, squeeze
from trace_jax.evaluation.finders.campaign import Campaign, Pair, Rows
from trace_jax.evaluation.finders.leaves import Element, Leaves, click_rate, pairs
from trace_jax.simulator.causes import SEGMENT_CAUSES

Query = Callable[[str], Rows]
Fitted = Mapping[str, float]
Finder = Callable[[Campaign, Query, Fitted], tuple[Pair, ...] | None]


def _in_leaves(find: Callable[[Leaves], Element | None]) -> Finder:
    return lambda seen, query, fitted: pairs(find(click_rate(seen)))


# Which slice segment causes are considered in; None: every one of them, and the best wins.
FINDERS: Mapping[str, Finder] = {
    "contribution": lambda seen, query, fitted: contribution.choose(
        query(contribution.SQL), fitted[contribution.CONCENTRATION]
    ),
    "adtributor": _in_leaves(adtributor.find),
    "squeeze": _in_leaves(squeeze.find),
    "riskloc": _in_leaves(riskloc.find),
    "scan": lambda seen, query, fitted: None,
}


def investigate(episode: AdsEpisode, name: str, fitted: Fitted) -> Transcript:
    """One finder on one episode. Its tool calls are its queries.

    Args:
        name: of `FINDERS`.
        fitted: thresholds of the shared rules, and what else was fitted for this finder.
    """
    steps: list[tuple[str, str]] = []

    def query(sql: str) -> Rows:
        rows = episode.query(sql)
        steps.append((sql, f"{len(rows)} rows"))
        return rows

    seen = campaign.read(query)
    verdict = rules.decide(rules.scores(quasi.scan(seen)), fitted, FINDERS[name](seen, query, fitted))
    evidence = [f"gain over the next best explanation {verdict.margin:.1f}"]
    return Transcript(steps, format_answer(verdict.cause, verdict.driver, evidence), confidence=verdict.margin)


def examples(
    truths: Sequence[tuple[str, tuple[Pair, ...]]],
    query_of: Callable[[int], Query],
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, list[rules.Example]], dict[str, dict[str, float]]]:
    """What every finder's rules are fitted on, and what was fitted of the finders themselves.

    Args:
        truths: cause and driver slice of each training episode.
        query_of: how to query the agent-visible tables of episode i.
    """
    gains, campaigns, tables = [], [], []
    for i in range(len(truths)):
        query = query_of(i)
        campaigns.append(campaign.read(query))
        gains.append(rules.scores(quasi.scan(campaigns[-1])))
        tables.append(query(contribution.SQL))
        if on_progress:
            on_progress(i + 1, len(truths))
    local = [i for i, (cause, _) in enumerate(truths) if cause in SEGMENT_CAUSES]
    share = contribution.fit([tables[i] for i in local], [truths[i][1] for i in local])
    own = {name: {contribution.CONCENTRATION: share} if name == "contribution" else {} for name in FINDERS}
    found = {
        name: [
            rules.Example(gains[i], finder(campaigns[i], lambda sql, i=i: tables[i], own[name]), *truths[i])
            for i in range(len(truths))
        ]
        for name, finder in FINDERS.items()
    }
    return found, own
