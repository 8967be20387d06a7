"""Agents in record form: a policy through the collector with a scripted generator, and the scripted analyst."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from helpers_collect import Script

from trace_jax.config import ConfigError, EnvironmentConfig, EvaluationConfig, RolloutConfig, SimulatorConfig
from trace_jax.environments.ads.answer import format_answer
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.evaluation import metrics
from trace_jax.evaluation.baselines import evaluate_agent, evaluate_analyst
from trace_jax.evaluation.evaluate import evaluate_policy, records_of
from trace_jax.evaluation.finders import agents as finders
from trace_jax.evaluation.finders import rules
from trace_jax.policy.chat import Turn
from trace_jax.rollout.sampling import Sampling
from trace_jax.simulator.accepted import accepted_episodes
from trace_jax.warehouse.database import QueryError
from trace_jax.warehouse.splits import EpisodeSet

COMPOSITION = {
    ("BUDGET_CAP", 0): 2,
    ("PLACEMENT_SHIFT", 1): 1,
    ("AD_QUALITY_DROP", 1): 2,
    ("CREATIVE_FATIGUE", 2): 2,
    ("NO_SIGNAL", 0): 1,
}
STOP, BASE = 1, 10


class TextChat:
    """Code points as ids; a turn is C or A, its text, and the stop id."""

    def encode_prompt(self, system, user):
        return [BASE + ord(c) for c in user]

    def encode_observation(self, text):
        return [BASE + ord(c) for c in text]

    def parse_turn(self, ids):
        text = "".join(chr(i - BASE) for i in ids[:-1])
        return Turn({"C": "call", "A": "answer"}.get(text[:1], "malformed"), text[1:])


def scripted(answers, slots=64):
    """A generator that asks one query and then says what `answers` holds for the row."""

    def turn(row, number):
        text = answers[row] if number == 1 else 'Csql("SELECT count(*) FROM segment_daily")'
        return [*(BASE + ord(c) for c in text), STOP]

    return Script(turn, slots, STOP)


@pytest.fixture(scope="module")
def environment():
    config = SimulatorConfig(batch=64, segments=24)
    episodes = EpisodeSet(*accepted_episodes(config, 5, "test-agents", COMPOSITION), split="test")
    return AdsEnvironment(episodes, EnvironmentConfig())


def test_policy_is_graded_sample_by_sample(environment):
    """Per episode: the gold answer, the right cause without its slice, prose that is no answer."""
    answers = []
    for i in range(len(environment)):
        task = environment.task(i)
        answers += ["A" + task.gold_answer, "A" + format_answer(task.labels["cause"], ()), "Adunno"]
    generator = scripted(answers, slots=7)
    rollout = RolloutConfig(context=8000, max_turn_tokens=1000, max_turns=4, temperature=1.0)
    config = EvaluationConfig(samples=3, temperature=0.5, top_p=0.9, bootstrap=50)
    seen = []
    trajectories = evaluate_policy(
        generator,
        TextChat(),
        environment,
        range(len(environment)),
        config,
        rollout,
        on_progress=lambda *x: seen.append(x),
    )
    records = records_of(trajectories)
    assert generator.begun == [Sampling(0.5, top_p=0.9)] and generator.most_held == 7 and seen[-1] == (8, 8)
    assert len(set(generator.seeds.values())) == len(generator.released) == 24
    assert [(r.index, r.sample) for r in records] == [(i, s) for i in range(8) for s in range(3)]
    result = metrics.summarise(records, config)
    assert result["cause_at_1"]["value"] == pytest.approx(2 / 3)
    assert result["parsed"]["value"] == pytest.approx(2 / 3)
    assert result["tool_calls"]["value"] == 1.0
    assert result["by_type"]["campaign"]["value"] == pytest.approx(2 / 3)
    assert result["by_type"]["segment_1d"]["value"] == result["by_type"]["segment_2d"]["value"] == pytest.approx(1 / 3)
    assert result["no_signal"]["value"] == pytest.approx(2 / 3)
    assert result["jaccard"]["value"] == pytest.approx(0.5)
    counts = np.array(result["extra"]["confusion"]["counts"])
    assert counts[:, -1].sum() == 8 and counts[:, :-1].sum() == 16


def test_an_episode_named_twice_is_refused(environment):
    with pytest.raises(ConfigError, match="named twice"):
        evaluate_policy(scripted([]), TextChat(), environment, [0, 1, 0], EvaluationConfig(), RolloutConfig())


def test_unanswered_investigations_count_as_wrong(environment):
    """A policy that never answers runs into the turn limit: not parsed, nothing right, still in every denominator."""
    generator = scripted(['Csql("SELECT 1")'] * 8)
    rollout = RolloutConfig(context=8000, max_turn_tokens=1000, max_turns=2)
    config = EvaluationConfig(samples=1, bootstrap=50)
    records = records_of(evaluate_policy(generator, TextChat(), environment, range(8), config, rollout))
    assert Counter(r.status for r in records) == {"truncated": 8}
    result = metrics.summarise(records, config)
    assert result["cause_at_1"]["value"] == result["parsed"]["value"] == 0.0
    assert result["extra"]["status"] == {"truncated": 8}


def test_analyst_is_reproducible_and_knows_only_what_its_tool_says(environment):
    config = EnvironmentConfig()
    first = evaluate_analyst(environment, range(8), config, samples=2, seed=3)
    assert first == evaluate_analyst(environment, range(8), config, samples=2, seed=3)
    assert [(r.index, r.sample) for r in first] == [(i, s) for i in range(8) for s in range(2)]
    assert all(r.parsed and r.status == "finished" and r.tool_calls >= 1 for r in first)
    one = evaluate_analyst(environment, [5], config, samples=2, seed=3)
    assert one == [r for r in first if r.index == 5]  # does not depend on what else is evaluated

    class Blindfolded:
        """The same episodes with labels and gold answer withheld from the task."""

        def __len__(self):
            return len(environment)

        def task(self, index):
            return dataclasses.replace(
                environment.task(index), gold_answer="", labels={"cause": "NO_SIGNAL", "type": "x"}
            )

        def open(self, task):
            return environment.open(environment.task(task.index))

    blind = evaluate_analyst(Blindfolded(), range(8), config, samples=2, seed=3)
    assert [(r.predicted, r.tool_calls, r.cause_right) for r in blind] == [
        (r.predicted, r.tool_calls, r.cause_right) for r in first
    ]


@pytest.mark.parametrize("name", sorted(finders.FINDERS))
def test_finders_are_graded_like_any_agent(environment, name):
    """Their answers parse exactly, follow from the tables alone, and the scan is right on most accepted episodes."""
    thresholds = rules.thresholds("", name)

    def agent(episode, task, rng):
        return finders.investigate(episode, name, thresholds)

    records, again = (evaluate_agent(environment, range(len(environment)), agent, metrics.record_of) for _ in range(2))
    assert records == again and all(r.parsed and r.exact_parsed and r.status == "finished" for r in records)
    assert all(r.tool_calls == 2 + (name == "contribution") and r.confidence > 0 for r in records)
    if name == "scan":
        assert sum(r.full_right for r in records) >= 7


def test_hidden_tables_are_out_of_a_finders_reach(environment):
    with environment.open(environment.task(0)) as episode, pytest.raises(QueryError, match="gt_episode"):
        episode.query("select * from gt_episode")
