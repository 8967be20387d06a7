"""What a person sees after the answer: the grade, the truth, how the scripted analyst and the trained policy went."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.config import EnvironmentConfig, RunConfig
from trace_jax.environments.ads import analyst, queries
from trace_jax.environments.ads.answer import parse_lenient
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.environments.base import Reward
from trace_jax.recipes import inspect_text
from trace_jax.recipes.play_answer import spoken
from trace_jax.recipes.rundir import stored_config
from trace_jax.report.episode_facts import facts
from trace_jax.rollout.trajectory import read_parquet
from trace_jax.simulator.causes import SEGMENT_CAUSES
from trace_jax.simulator.vocabulary import ATTRIBUTES, DRIVER_ATTRIBUTES
from trace_jax.warehouse.splits import EpisodeRecord, EpisodeSet, settings_of

LABEL = 12  # columns, as in `inspect`
SHOWN_LINES = 6  # of what the analyst read


def segments(pairs: Any) -> list[dict[str, str]]:
    """Pairs in the form that answers have."""
    return [{"dimension": a, "value": v} for a, v in pairs]


def grade_lines(answer: str, reward: Reward, config: EnvironmentConfig, cause: str) -> list[str]:
    """The answer and its reward by part.

    Args:
        cause: the true one.
    """
    parsed = parse_lenient(answer)
    said = spoken(parsed and parsed.root_cause, parsed.driver_segments if parsed else ())
    weights = {"attr": config.reward_attr, "full": config.reward_full, "format": config.reward_format}
    names = {"attr": "attribution", "full": "fully right", "format": "readable"}
    terms = " + ".join(f"{weights[k]:g} x {reward.parts[k]:.3g} {names[k]}" for k in weights)
    if config.penalty_false_cause:
        terms += f" - {config.penalty_false_cause:g} x {reward.parts['false_cause']:.3g} false cause"
    if reward.info["full_right"]:
        verdict = "right"
    elif reward.info["cause_right"]:
        verdict = f"the cause is right, the slice is not (overlap {reward.info['slice_jaccard']:.2f})"
    else:
        verdict = "wrong" if reward.info["parsed"] else "not readable"
    overlap = cause in SEGMENT_CAUSES and reward.info["cause_right"]
    formula = " (attribution = .5 + .5 x overlap of the slice)" if overlap else ""
    return [
        *_labelled("you", f"{said}: {verdict}"),
        *_labelled("reward", f"{reward.total:.3f} = {terms}{formula}"),
    ]


def truth_lines(record: EpisodeRecord, title: str, question: str) -> list[str]:
    """What `inspect` shows: the truth, curves, confounders, the oracle's margins."""
    return inspect_text.lines(facts(record), title, question)


def investigate(record: EpisodeRecord, config: RunConfig) -> analyst.Transcript:
    """The scripted analyst's investigation, the one that `trace-jax eval --agent analyst` scores.

    It has an attempt of its own, and reads the compact style whatever a person reads.
    """
    own = dataclasses.replace(config.environment, prompt="compact")
    environment = AdsEnvironment(EpisodeSet(record.batch, record.verdict, record.split), own)
    task = environment.task(record.position)
    with environment.open(task) as attempt:
        rng = np.random.default_rng([config.seed, record.index, 0])
        return analyst.investigate(attempt, task, rng, own.prompt)


def analyst_lines(transcript: analyst.Transcript, reward: Reward) -> list[str]:
    """Its steps in words with what it read, and its answer."""
    out = []
    for number, (code, text) in enumerate(transcript.steps, 1):
        out += _labelled("" if out else "analyst", f"{number}. {step_in_words(query_of(code))}")
        read = text.splitlines()
        cut = [f"... {len(read) - SHOWN_LINES} more lines"] if len(read) > SHOWN_LINES else []
        out += [f"{'':<{LABEL}}   {line}" for line in [*read[:SHOWN_LINES], *cut]]
    parsed = parse_lenient(transcript.answer)
    said = spoken(parsed and parsed.root_cause, parsed.driver_segments if parsed else ())
    return [*out, *_labelled("" if out else "analyst", f"answers {said}: {_verdict(reward)}")]


def query_of(code: str) -> str:
    """The query of one of its calls."""
    return code.removeprefix('sql("""').removesuffix('""")')


def step_in_words(query: str) -> str:
    """What a query of the analyst asks; the query itself if it is none of its usual ones."""
    known = {
        queries.overview(): "the campaign against its siblings, if there are any: z of each metric's change",
        queries.budget(): "spend over budget, first half and second half",
    }
    z = "z of CTR, CVR, CPC and share against the rest"
    for limit in (2, 3):
        known[queries.single(limit)] = f"slices of one attribute, {z}"
        known[queries.scan(limit)] = f"slices of one and of two attributes, {z}"
        known[queries.mix(limit)] = f"placements and audiences whose share changed most, {z}"
        for attribute in DRIVER_ATTRIBUTES:
            for value in ATTRIBUTES[attribute]:
                known[queries.pairs(attribute, value, limit)] = f"inside {attribute}={value}, {z}"
    weekly = [line for line in query.splitlines() if line.strip().startswith("where ")]
    if "// 7" in query and weekly:
        return f"week by week, {weekly[0].split(' group by')[0].strip()}"
    return known.get(query, " ".join(query.split()))


def policy_lines(run_dir: Path, config: RunConfig, record: EpisodeRecord) -> list[str]:
    """How the run's policy answered this episode in its held-out evaluation; why not known, if it is not."""
    return list(_policy(run_dir, config, record)) or _labelled(
        "policy", "the run has not been evaluated on this episode"
    )


def _policy(run_dir: Path, config: RunConfig, record: EpisodeRecord) -> Iterator[str]:
    stored = stored_config(run_dir)
    same = settings_of(stored) == settings_of(config) and stored.data.test == config.data.test
    if record.split != "test" or not same:
        yield from _labelled("policy", "not shown: the run was evaluated on the test split of its own settings")
        return
    for stage in ("sft", "grpo"):
        path = run_dir / "trajectories" / f"{stage}.parquet"
        if not path.is_file():
            continue
        own = [t for t in read_parquet(path) if t.task_index == record.index and _is_of(t.labels, record)]
        said: Counter[str] = Counter()
        for t in own:
            parsed = parse_lenient(t.answer or "")
            text = spoken(parsed.root_cause, parsed.driver_segments) if parsed else f"no answer ({t.status})"
            said[f"{text}, reward {t.reward:.2f}"] += 1
        for text, count in said.most_common():
            yield from _labelled(stage, f"{count} of {len(own)}: {text}")
        if own:
            calls = np.mean([t.tool_calls for t in own])
            yield from _labelled("", f"{calls:.1f} calls on average")


def _is_of(labels: Mapping[str, Any], record: EpisodeRecord) -> bool:
    """Whether a trajectory's labels are the episode's. A run may be older than today's simulator, and its episode of
    this number another one."""
    driver = labels.get("driver")
    pairs = {tuple(pair) for pair in driver} if isinstance(driver, list) else None
    return labels.get("cause") == record.cause and pairs == set(record.driver)


def _verdict(reward: Reward) -> str:
    return f"{'right' if reward.info['full_right'] else 'wrong'}, reward {reward.total:.2f}"


def _labelled(label: str, text: str) -> list[str]:
    broken = textwrap.wrap(text, inspect_text.WIDTH - LABEL) or [""]
    return [f"{'' if n else label:<{LABEL}}{line}" for n, line in enumerate(broken)]
