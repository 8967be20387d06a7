"""Training options that keep abstention, and what abstaining costs: against computations of their own."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest

from trace_jax.config import ConfigError, EnvironmentConfig, EvaluationConfig, RunConfig
from trace_jax.config_rules import validate
from trace_jax.environments.ads.answer import format_answer
from trace_jax.environments.ads.reward import grade
from trace_jax.evaluation import metrics
from trace_jax.evaluation.reliability import decided, tradeoff
from trace_jax.learner.advantages import group_advantages
from trace_jax.recipes import schedule
from trace_jax.recipes.generation import check_no_signal, prompts

FATIGUE, DRIVER = "CREATIVE_FATIGUE", (("geo", "US"),)


def paid(answer, cause, **changes):
    return grade(answer, cause, DRIVER, dataclasses.replace(EnvironmentConfig(), **changes))


@pytest.mark.parametrize(
    ("answer", "cause", "fined", "usual"),
    [
        (format_answer("NO_SIGNAL"), FATIGUE, 0, 0.05),
        (format_answer("BUDGET_CAP"), FATIGUE, 1, 0.05),
        (format_answer("BUDGET_CAP"), "NO_SIGNAL", 1, 0.05),
        (format_answer("NO_SIGNAL"), "NO_SIGNAL", 0, 1.0),
        (format_answer(FATIGUE, [("geo", "JP")]), FATIGUE, 0, 0.05 + 0.65 / 2),  # the cause did act
        (format_answer(FATIGUE, DRIVER), FATIGUE, 0, 1.0),
        ("nothing that can be read", FATIGUE, 0, 0.0),
    ],
)
def test_penalty_for_a_false_cause(answer, cause, fined, usual):
    without, fine = paid(answer, cause), paid(answer, cause, penalty_false_cause=0.3)
    assert without.total == pytest.approx(usual) and fine.total == pytest.approx(usual - 0.3 * fined)
    assert without.parts == fine.parts and fine.parts["false_cause"] == fined


def test_where_the_penalty_reaches_normalised_advantages():
    """Two rewards in a group: the same advantages with any penalty. Three: the false cause falls below abstaining."""

    def of(cause, said, penalty, **how):
        rewards = [paid(format_answer(*s), cause, penalty_false_cause=penalty).total for s in said]
        return group_advantages(rewards, [0] * len(rewards), **how).values

    quiet = [("NO_SIGNAL",), ("NO_SIGNAL",), ("BUDGET_CAP",)]
    assert np.allclose(of("NO_SIGNAL", quiet, 0.0), of("NO_SIGNAL", quiet, 0.5), atol=1e-5)
    plain, fined = (of("NO_SIGNAL", quiet, p, divide_std=False) for p in (0.0, 0.5))
    assert np.allclose(fined, plain * (0.95 + 0.5) / 0.95)
    mixed = [(FATIGUE, DRIVER), ("NO_SIGNAL",), ("BUDGET_CAP",)]
    right, abstained, wrong = of(FATIGUE, mixed, 0.0)
    assert abstained == wrong < right
    rewards = np.array([1.0, 0.05, -0.45])
    assert np.allclose(of(FATIGUE, mixed, 0.5), (rewards - rewards.mean()) / rewards.std(), atol=1e-5)


def test_no_signal_share_is_exact_on_average_and_repeats_no_prompt():
    quiet = list(range(0, 400, 20))
    for share in (0.05, 0.1, 0.3, 1.0):
        drawn = [schedule.grpo_prompts(3, step, 8, 400, quiet, share) for step in range(60)]
        assert all(len(set(step)) == 8 for step in drawn)
        counts = Counter(p for step in drawn for p in step if p in quiet)
        expected = 60 * 8 * (share + (1 - share) * len(quiet) / 400)
        assert abs(counts.total() - expected) <= 12, share  # the shuffle's own part is 5 % on average, not in each step
        if share >= 0.3:  # all of them are used, none much more often than the others
            assert set(counts) == set(quiet) and max(counts.values()) - min(counts.values()) <= 5
        assert schedule.grpo_prompts(3, 40, 8, 400, quiet, share) == drawn[40]  # whatever came before
    usual = [p for step in range(50) for p in schedule.grpo_prompts(3, step, 8, 400, quiet, 0.0)]
    assert sorted(usual) == list(range(400))


def test_a_share_that_the_split_cannot_give_is_filled_and_refused():
    assert sorted(schedule.grpo_prompts(0, 5, 8, 8, [2, 3], 0.5)) == list(range(8))  # every episode once
    config = RunConfig()
    config = dataclasses.replace(config, grpo=dataclasses.replace(config.grpo, no_signal_share=0.25, prompts=8))
    check_no_signal(config, 100, [1, 99])
    with pytest.raises(ConfigError, match="draws 2 no-signal episodes a step, and the training split has 1"):
        check_no_signal(config, 100, [99])
    staged = dataclasses.replace(config, data=dataclasses.replace(config.data, curriculum=("easy", "hard")))
    check_no_signal(staged, 100, [1, 2, 98, 99])
    with pytest.raises(ConfigError, match="stage 2 of `data.curriculum` has 1"):
        check_no_signal(staged, 100, [1, 2, 99])


def test_no_signal_share_in_a_curriculum():
    config = RunConfig()
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, train=120, curriculum=("easy", "hard")),
        grpo=dataclasses.replace(config.grpo, steps=10, prompts=8, no_signal_share=0.3),
    )
    quiet = [3, 17, 30, 50, 70, 90, 110, 119]
    for step in range(10):
        chosen = prompts(config, step, 120, quiet)
        assert len(set(chosen)) == 8 and chosen == prompts(config, step, 120, quiet)
        assert all(p < 60 for p in chosen) if step < 5 else all(60 <= p < 120 for p in chosen)
        assert sum(p in quiet for p in chosen) >= 2


@pytest.mark.parametrize(
    ("section", "changes", "says"),
    [
        ("environment", {"penalty_false_cause": -0.1}, "environment.penalty_false_cause"),
        ("environment", {"penalty_false_cause": 11.0}, "environment.penalty_false_cause"),
        ("grpo", {"no_signal_share": 1.5}, "grpo.no_signal_share"),
        ("grpo", {"no_signal_share": 0.001, "steps": 10}, "comes to none in 10 steps"),
    ],
)
def test_refused_settings(section, changes, says):
    config = RunConfig()
    config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changes)})
    with pytest.raises(ConfigError, match=says):
        validate(config)


def test_search_has_no_false_causes():
    config = RunConfig(environment=EnvironmentConfig(name="search", penalty_false_cause=0.2))
    with pytest.raises(ConfigError, match="penalty_false_cause.*belongs to"):
        validate(config)


def _answers(index, cause, said):
    """said: the answers of an episode; "right" stands for the cause."""
    kind = "no_signal" if cause == "NO_SIGNAL" else "campaign"
    rows = []
    for sample, word in enumerate(said):
        name = cause if word == "right" else word
        right = name == cause
        rows.append(
            metrics.EvalRecord(
                index, kind, cause, sample, name is not None, right, right, None, 2, "finished", predicted=name
            )
        )
    return rows


def test_the_trade_off_by_hand():
    groups = [
        _answers(0, "BUDGET_CAP", ["right", "right", "right", "NO_SIGNAL"]),
        _answers(1, "BUDGET_CAP", ["right", "NO_SIGNAL", "NO_SIGNAL", "NO_SIGNAL"]),
        _answers(2, "NO_SIGNAL", ["BID_INCREASE", "right", "right", "BID_INCREASE"]),
        _answers(3, "NO_SIGNAL", ["BID_INCREASE"] * 4),
        _answers(4, "OUT_OF_STOCK", ["NO_SIGNAL"] * 4),
    ]
    ratio = lambda top, bottom: {"value": float(np.sum(top)) / float(np.sum(bottom))}  # noqa: E731
    found = [(p["threshold"], p["no_signal"]["value"], p["signal"]["value"]) for p in tradeoff(groups, ratio)]
    assert found == [
        (0.25, 1 / 2, 0.0),
        (0.5, 1 / 2, pytest.approx(1 / 3)),
        (0.75, 0.0, pytest.approx(1 / 3)),
        (1.0, 0.0, pytest.approx(2 / 3)),
    ]
    assert decided(groups[4], 1.0).predicted == "NO_SIGNAL"  # nobody says anything else


def test_the_trade_off_is_monotone_and_in_the_result():
    rng = np.random.default_rng(5)
    rows = list(
        itertools.chain.from_iterable(
            _answers(i, cause, rng.choice(["right", "NO_SIGNAL", "PAGE_DEGRADATION"], 5).tolist())
            for i, cause in enumerate(rng.choice(["NO_SIGNAL", "BID_INCREASE"], 80).tolist())
        )
    )
    extra = metrics.summarise(rows, EvaluationConfig(bootstrap=200))["extra"]
    points = extra["abstention"]["decision"]
    assert [p["threshold"] for p in points] == [0.2, 0.4, 0.6, 0.8, 1.0]
    quiet = [p["no_signal"]["value"] for p in points]
    assert quiet == sorted(quiet, reverse=True) and quiet[0] > quiet[-1]
    signal = [r for r in rows if r.cause != "NO_SIGNAL"]
    assert extra["signal"]["value"] == pytest.approx(np.mean([r.full_right for r in signal]))
    assert all(p[k]["low"] <= p[k]["value"] <= p[k]["high"] for p in points for k in ("no_signal", "signal"))
