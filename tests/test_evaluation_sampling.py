"""Evaluation draws with its own sampler, and results say with which."""

import dataclasses

import pytest

from trace_jax.config import ConfigError, EvaluationConfig, RolloutConfig, RunConfig
from trace_jax.evaluation import evaluate
from trace_jax.recipes import assess
from trace_jax.rollout.sampling import Sampling


def test_evaluation_has_its_own_sampler(monkeypatch):
    seen = []
    monkeypatch.setattr(evaluate, "collect", lambda *_, sampling, group, **__: seen.append((sampling, group)) or [])
    config = EvaluationConfig(samples=3, temperature=0.4, top_k=7, top_p=0.9, min_p=0.02)
    evaluate.evaluate_policy(None, None, None, [0, 1], config, RolloutConfig(temperature=1.0, top_k=2))
    assert seen == [(Sampling(0.4, 7, 0.9, 0.02), 3)]


def test_settings_of_a_result_name_the_sampler_and_nothing_that_changes_only_the_speed():
    config = RunConfig()
    settings = assess._settings(config, "test")
    for name in ("temperature", "top_k", "top_p", "min_p"):
        assert settings[f"evaluation.{name}"] == getattr(config.evaluation, name)
        assert f"rollout.{name}" not in settings
    faster = dataclasses.replace(config.rollout, slots=8, decode_steps=3, tool_workers=5)
    assert assess._settings(config.replace(rollout=faster), "test") == settings
    longer = dataclasses.replace(config.rollout, max_turn_tokens=65)
    assert assess._settings(config.replace(rollout=longer), "test") != settings


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_the_sampler_of_training_cannot_change_in_an_evaluation(name):
    config = RunConfig()
    with pytest.raises(ConfigError, match=f"`rollout.{name}` cannot change[^\n]*evaluation.{name} does"):
        assess._check_changes(config, config, [f"rollout.{name}"], "test")
    assess._check_changes(config, config, [f"evaluation.{name}", "rollout.decode_steps"], "test")
