"""Worlds of capabilities: rewards against hand labels, recorded attempts, mixtures, what a configuration may say."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers_episodes import fake_set

from trace_jax import config_io
from trace_jax.config import ConfigError, EnvironmentConfig, RunConfig, SimulatorConfig
from trace_jax.config_rules import LEVELS
from trace_jax.config_rules import WORLDS as NAMED
from trace_jax.environments.ads import queries
from trace_jax.environments.ads.answer import format_answer
from trace_jax.environments.ads.capabilities import CAPABILITIES, Case
from trace_jax.environments.ads.worlds import WORLDS, Mixture, WorldEnvironment, harder, named
from trace_jax.environments.capability import Attempt
from trace_jax.recipes.domain import domain_of

HAND = json.loads((Path(__file__).parent / "data" / "capability_hand_labels.json").read_text())


def attempts():
    for entry in HAND["attempts"]:
        steps = tuple((HAND["codes"][code], text) for code, text in entry["steps"])
        facts, ending = entry["facts"], entry["ending"]
        yield Attempt(entry["user"], steps, entry["answer"], ending, facts, entry["passed"]), entry["labels"]


@pytest.mark.parametrize("name", WORLDS)
def test_rewards_follow_the_hand_labels(name):
    """Those whose capability is there earn more than those that lack it; success is PRESENT."""
    world, earned = WORLDS[name], {"PRESENT": [], "LACKING": []}
    for attempt, labels in attempts():
        if Case.of(attempt).answer is None:
            assert world.reward(attempt) == (0.0, False)
        if Case.of(attempt).answer is None or attempt.ending != "answered":
            continue
        reward, success = world.reward(attempt)
        assert 0.0 <= reward <= 1.0 and sum(w for w, _ in world.parts(Case.of(attempt))) == pytest.approx(1.0)
        label = labels.get(name)
        if label in earned:
            earned[label].append(reward)
            assert success == (label == "PRESENT"), (name, attempt)
    if earned["LACKING"]:
        assert np.mean(earned["PRESENT"]) > np.mean(earned["LACKING"]) + 0.1, earned


def environment(name):
    return WorldEnvironment(fake_set(5), EnvironmentConfig(), WORLDS[name])


def test_an_attempt_is_graded_by_what_it_did():
    """Episode 0 has a slice of two attributes: the same answer earns more after the queries that show it."""
    world = environment("intersection")
    task = world.task(0)
    gold = format_answer(task.labels["cause"], task.labels["driver"])
    assert task.hint and task.hint not in task.user and task.labels["world"] == "intersection"
    with world.open(task) as guessed, world.open(task) as looked:
        query = f'sql("""{queries.scan(3)}""")'
        seen = looked.step(query)
        assert not seen.error
        bare, whole = guessed.grade(gold), looked.grade(gold)
        attempt = Attempt(task.user, ((query, seen.text),), gold, "answered", task.labels, True)
        assert (
            (whole.total, whole.info["success"]) == WORLDS["intersection"].reward(attempt) == (pytest.approx(1), True)
        )
        assert bare.total == pytest.approx(0.75) and not bare.info["success"]
        assert bare.info["full_right"] and whole.info["full_right"]  # the task's own grade
        assert looked.grade("no answer").total == 0.0


def test_a_mixture_takes_turns():
    parts = [environment("intersection"), environment("abstaining")]
    mixed = Mixture(parts)
    assert len(mixed) == 10
    for index in range(10):
        task, own = mixed.task(index), parts[index % 2].task(index // 2)
        assert task.index == index and (task.user, task.hint, task.labels) == (own.user, own.hint, own.labels)
        with mixed.open(task) as episode:
            assert not episode.step('sql("select count(*) n from segment_daily")').error
    with pytest.raises(IndexError):
        mixed.task(10)


def test_levels_halve_the_effects_every_two():
    assert harder(SimulatorConfig(strength=0.8), 2).strength == pytest.approx(0.4)
    assert (
        harder(SimulatorConfig(), -2).strength == pytest.approx(2.0)
        and harder(SimulatorConfig(), 0) == SimulatorConfig()
    )
    assert named("abstaining@-1.5")[1] == -1.5 and named("abstaining") == (WORLDS["abstaining"], 0.0)


def test_a_run_in_worlds_has_their_episodes(tmp_path):
    fields = [
        ("environment.worlds", "[intersection@1, abstaining]"),
        ("data.validation", "6"),
        ("grpo.validation_episodes", "0"),
    ]
    config = config_io.override(RunConfig(), fields)
    made = domain_of(config).split(config, "validation", tmp_path, None)
    labels = [made.task(i).labels for i in range(len(made))]
    assert [x["world"] for x in labels] == ["intersection", "abstaining"] * 3
    assert {x["type"] for x in labels[::2]} == {"segment_2d"}
    again = domain_of(config).split(config, "validation", tmp_path, None)  # from the cache
    assert [again.task(i) for i in range(6)] == [made.task(i) for i in range(6)]
    assert len(list(tmp_path.glob("world-*.npz"))) == 2


def test_what_a_configuration_may_say():
    assert NAMED == tuple(WORLDS) == tuple(c.name for c in CAPABILITIES)
    for text, message in (
        ("[intersektion]", "choose from tool_protocol"),
        ("[intersection@x]", "give a level from"),
        (f"[intersection@{LEVELS + 1}]", "such as intersection@1.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_io.override(RunConfig(), [("environment.worlds", text)])
    with pytest.raises(ConfigError, match="only worlds have hints"):
        config_io.override(RunConfig(), [("grpo.hints", "0.25")])
    config_io.override(RunConfig(), [("grpo.hints", "0.25"), ("environment.worlds", "[stopping]")])
    with pytest.raises(ConfigError, match="environment.worlds"):
        config_io.override(RunConfig(), [("environment.name", "search"), ("environment.worlds", "[stopping]")])
