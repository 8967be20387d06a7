"""The trajectories of a page as data: an index of one row each, and parts that are unpacked when they are looked at.

A part holds whole episodes, whatever agent or run tried them, so that texts that recur (the prompt, results of the same
query) are kept once, and one part is all that a view of an episode needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trace_jax.config import RunConfig, TurnCreditConfig
from trace_jax.evaluation.kinds import Kind
from trace_jax.policy.chat import Chat
from trace_jax.report.packed import Words, finite, pack
from trace_jax.report.recorded import Shown
from trace_jax.report.subjects import Series, source
from trace_jax.report.turns import Worth, prompt, steps, worth
from trace_jax.rollout.trajectory import Trajectory

PART = 400_000  # characters of text in a part
BUDGET = 20_000_000  # characters of all parts together, of the 25 MB that a page may have
# Of a row of the index; the upper ones are numbers of words.
NAMED = ("stage", "type", "group", "truth", "where", "status", "outcome", "answered", "place")
COUNTED = ("run", "task", "sample", "reward", "calls", "tokens", "logprob", "episode", "part", "entry")


@dataclass(frozen=True)
class Run:
    """A run as far as its trajectories go.

    Attributes:
        chat: None without a tokenizer; `shown` is empty then.
        config: None where it cannot be read.
        series: by (split, task), see `subjects.series`.
    """

    number: int
    kind: Kind
    chat: Chat | None
    config: RunConfig | None
    shown: Sequence[Shown]
    series: dict[tuple[str, int], Series]


@dataclass(frozen=True)
class Graded:
    """How a trajectory ended, in words: `group` is what failures are counted by, see `Kind`."""

    type: str
    group: str
    truth: str
    where: str
    outcome: str
    answered: str
    place: str  # of the answer, as `where` is of the truth


def graded(t: Trajectory, kind: Kind) -> Graded:
    """Of labels that no environment writes as much as can be said."""
    try:
        _, truth, where = kind.truth(t.labels)
    except (TypeError, ValueError):
        truth, where = "unknown", ""
    kept = str(t.labels.get("type", "unknown")), str(truth), str(where)
    try:
        record = kind.record_of(t.task_index, t.sample, t.labels, t.info, t.tool_calls, t.status)
        answered, place = kind.answered(record)
        group, outcome = str(kind.group[1](record)), kind.outcome(record)
    except (KeyError, TypeError, ValueError):
        outcome = "right" if t.info.get("full_right") else t.status
        return Graded(kept[0], "unknown", *kept[1:], outcome, "", "")
    return Graded(kept[0], group, *kept[1:], outcome, str(answered), str(place))


def encode(runs: Sequence[Run], budget: int = BUDGET) -> tuple[dict[str, Any], list[str], int]:
    """Index and parts of the trajectories of one or two runs.

    Args:
        budget: characters that all parts may take: episodes that come last are left out.

    Returns:
        The index, to be packed: `words`, and by name a column of `NAMED` (numbers of words) or `COUNTED`; packed parts,
        by number; and how many trajectories were left out. A part has `words`; `series` by episode; `entries`, in the
        order of the column `entry`, see `_entry`.
    """
    episodes: dict[Any, list[tuple[Run, Shown]]] = {}
    for run in runs:
        origin = {split: run.number if run.config is None else source(run.config, split) for split in ("test", "train")}
        for shown in run.shown:
            t, split = shown.trajectory, shown.source.split
            key = (origin[split], split, t.task_index, json.dumps(t.labels, sort_keys=True))
            episodes.setdefault(key, []).append((run, shown))
    words, parts, rows = Words(), [], {}
    left_out, size = 0, 0
    for members in _batches(episodes):
        packed = None
        if size < budget:
            packed, found = _part(members, len(parts), words)
        if packed is None or size + len(packed) > budget:
            left_out += sum(len(group) for _, group in members)
            size = budget  # the rest goes, too: what is shown is the first so many
            continue
        parts.append(packed)
        size += len(packed)
        rows |= found
    order = {(run.number, id(shown)): None for run in runs for shown in run.shown}
    kept = [rows[key] for key in order if key in rows]
    columns = {name: [row[i] for row in kept] for i, name in enumerate((*NAMED, *COUNTED))}
    return {"words": words.texts, "columns": columns}, parts, left_out


def _batches(episodes: dict[Any, list[tuple[Run, Shown]]]) -> Iterable[list[tuple[int, list[tuple[Run, Shown]]]]]:
    """(number, members) of episodes, as many together as one part takes; four characters a token."""
    batch: list[tuple[int, list[tuple[Run, Shown]]]] = []
    size = 0
    for number, members in enumerate(episodes.values()):
        batch.append((number, members))
        size += sum(4 * len(shown.trajectory) for _, shown in members)
        if size >= PART:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _part(
    members: list[tuple[int, list[tuple[Run, Shown]]]], number: int, words: Words
) -> tuple[str, dict[Any, tuple[Any, ...]]]:
    """A packed part, and the rows of its trajectories in the index."""
    own, series, entries, rows = Words(), {}, [], {}
    for episode, group in members:
        for run, shown in group:
            t = shown.trajectory
            drawn = run.series.get((shown.source.split, t.task_index))
            if drawn is not None:
                series[str(episode)] = drawn
            g = graded(t, run.kind)
            known = t.logprobs[t.loss_mask]
            named = (shown.source.label, g.type, g.group, g.truth, g.where, t.status, g.outcome, g.answered, g.place)
            rows[run.number, id(shown)] = (
                *map(words, named),
                *(run.number, t.task_index, t.sample, finite(t.reward, 4), t.tool_calls, len(t)),
                finite(float(known.mean()), 4) if len(known) else None,
                *(episode, number, len(entries)),
            )
            entries.append(_entry(run, shown, own))
    return pack({"words": own.texts, "series": series, "entries": entries}), rows


def _entry(run: Run, shown: Shown, words: Words) -> dict[str, Any]:
    """One trajectory; texts are numbers of words. `steps` has a list for each turn: kind, text, why it is malformed,
    tokens, mean log-probability, its least likely token and that one's log-probability, policy version, observation
    (None: nothing answered), its tokens, and value, delta, credit and advantage of the turn (None: not recorded)."""
    t, chat = shown.trajectory, run.chat
    assert chat is not None
    config = run.config.grpo.turn_credit if run.config else TurnCreditConfig()
    try:
        values = worth(t, config, shown.advantage)
    except ValueError:  # probes of another trajectory
        values = []
    said = steps(t, chat)
    values += [Worth()] * (len(said) - len(values))
    return {
        "prompt": [[words(role), words(text.strip())] for role, text in prompt(t, chat)],
        "answer": None if t.answer is None else words(t.answer),
        "rewards": {str(name): _figure(value) for name, value in t.rewards.items()},
        "advantage": finite(shown.advantage, 4),
        "first": finite(t.probes[0], 4) if t.probes else None,
        "steps": [
            [
                words(s.turn.kind),
                words(s.turn.text.strip()),
                words(s.turn.reason),
                s.tokens,
                finite(s.logprob, 4),
                words(s.unlikeliest[0]) if s.unlikeliest else None,
                finite(s.unlikeliest[1], 4) if s.unlikeliest else None,
                s.version,
                None if s.observation is None else words(s.observation.strip()),
                s.observed,
                *(finite(x, 4) for x in (v.value, v.delta, v.credit, v.advantage)),
            ]
            for s, v in zip(said, values, strict=True)
        ],
    }


def _figure(value: Any) -> float | None:
    return finite(float(value), 4) if isinstance(value, int | float | np.number) else None
