"""The training split of a curriculum: equal parts of rising difficulty, and the prompts that GRPO draws from them."""

import dataclasses

import numpy as np
import pytest

from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_rules import validate
from trace_jax.recipes.generation import prompts
from trace_jax.simulator.confounders import CONFOUNDER_NAMES
from trace_jax.warehouse.splits import load_split, settings_of


def configured(**changes):
    config = RunConfig()
    return dataclasses.replace(
        config,
        simulator=dataclasses.replace(config.simulator, batch=128),
        data=dataclasses.replace(config.data, train=120, curriculum=("easy", "hard"), **changes),
        grpo=dataclasses.replace(config.grpo, steps=10, prompts=8),
    )


@pytest.mark.slow
def test_parts_have_their_difficulty():
    seen = []
    config = configured()
    episodes = load_split(config, "train", on_progress=lambda done, total: seen.append((done, total)))
    assert len(episodes) == 120 and episodes.verdict.accept.all()
    easy, hard = episodes.batch.confounders[:60] != 0, episodes.batch.confounders[60:] != 0
    lag = CONFOUNDER_NAMES.index("late_conversions")
    assert easy[:, lag].sum() == 0 < hard[:, lag].sum()  # only "hard" has them
    assert hard.mean() > easy.mean() + 0.1
    assert len(set(episodes.batch.campaign_id.tolist())) == 120
    assert seen[-1] == (120, 120) and seen == sorted(seen)
    assert settings_of(config) != settings_of(dataclasses.replace(config, data=RunConfig().data))


def test_prompts_follow_the_parts():
    config = configured()
    quiet = [3, 50, 70, 110]
    for step in range(10):
        chosen = prompts(config, step, 120, quiet)
        assert len(chosen) == 8
        assert all(p < 60 for p in chosen) if step < 5 else all(60 <= p < 120 for p in chosen)
        assert chosen == prompts(config, step, 120, quiet)  # whatever came before
    used = np.concatenate([prompts(config, step, 120, quiet) for step in range(5)])
    assert len(set(used.tolist())) == 40  # no episode twice before the part is through


def test_a_stage_smaller_than_a_step_is_refused():
    config = dataclasses.replace(
        configured(), data=dataclasses.replace(configured().data, train=12), grpo=RunConfig().grpo
    )
    with pytest.raises(ConfigError, match="exceeds"):
        validate(config)
