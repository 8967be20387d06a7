"""The fixed sets of `evaluation.set`: what they are made of, their rules, where results lie, and what is refused."""

import dataclasses
import json

import pytest
from test_evaluation_leaderboard import CONFIG, GRPO, SCAN, run_of

from trace_jax import cli
from trace_jax.config import ConfigError, EnvironmentConfig, EvaluationConfig, RunConfig, SimulatorConfig
from trace_jax.evaluation import sets, store
from trace_jax.evaluation.finders import rules
from trace_jax.evaluation.finders.agents import FINDERS
from trace_jax.recipes import assess
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.warehouse.identity import described
from trace_jax.warehouse.splits import load_split

HARD = RunConfig(evaluation=EvaluationConfig(set="hard"))
ANSWERS = "ede34115b8d19df08327678d5a6d68849d90ca438aa8202d893070a6c7a1b07c"


def test_a_set_does_not_depend_on_the_run():
    other = HARD.replace(
        simulator=SimulatorConfig(difficulty="easy", noise=3.0, batch=64),
        data=dataclasses.replace(HARD.data, seed=5, test=40, curriculum=("easy", "hard")),
    )
    one, two = sets.applied(HARD), sets.applied(other)
    assert dataclasses.replace(two.simulator, batch=one.simulator.batch) == one.simulator == sets.SETS["hard"].simulator
    assert (two.data.seed, two.data.test, two.evaluation.rules) == (2609, 470, "hard")
    assert sets.applied(RunConfig()) == RunConfig()  # no set: nothing changes
    own = HARD.replace(evaluation=EvaluationConfig(set="hard", rules="mine.json"))
    assert sets.applied(own).evaluation.rules == "mine.json"


def test_the_sets_are_of_the_advertising_environment():
    with pytest.raises(ConfigError, match="`evaluation.set` hard is of `environment.name` ads"):
        sets.applied(HARD.replace(environment=EnvironmentConfig(name="search")))


def test_rules_were_fitted_for_their_set():
    for name, path in rules.BUNDLED.items():
        fitted = json.loads(path.read_text())["fitted"]
        assert (fitted["set"], fitted["split"]) == (name, "train")
        for finder in FINDERS:
            assert set(rules.THRESHOLDS) <= rules.thresholds(name, finder).keys()
    assert rules.thresholds("hard", "scan") != rules.thresholds("", "scan")


def test_results_of_a_set_lie_apart(tmp_path, capsys):
    assert assess.name_of("scan", "test", {"evaluation.set": "hard"}) == "hard/scan"
    assert assess.name_of("scan", "test", {"evaluation.set": "hard", "evaluation.samples": 1}).startswith("other/")
    run = run_of(tmp_path / "run", {"scan": SCAN, "hard/scan": GRPO, "hard/grpo": GRPO})
    assert set(store.load_summaries(run)) == {"scan"} and set(store.load_summaries(run, "hard")) == {"scan", "grpo"}
    assert cli.main(["eval", "--table", str(run), "--set", "hard", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(told["agents"]) == {"scan", "SFT->GRPO"}
    assert told["agents"]["scan"]["extra"]["samples"] == 2  # of GRPO's answers, which stand in for the set's
    assert cli.main(["eval", "--compare", "scan", "grpo", "--run-dir", str(run), "--set", "hard"]) == 0
    assert cli.main(["eval", "--compare", "scan", "grpo", "--run-dir", str(run)]) == 2  # its own set has no grpo


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--set", "hard", "--split", "validation"), "takes the place of the test split"),
        (("--set", "hard", "--data.test", "100"), "`data.test` has no part in the hard set"),
        (("--set", "harder"), "evaluation.set"),
    ],
)
def test_what_a_set_does_not_go_with(words, why, tmp_path, capsys):
    with RunDirectory.create(tmp_path / "run", RunConfig()):
        pass
    assert cli.main(["eval", "--run-dir", str(tmp_path / "run"), "--agent", "scan", *words]) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1


def test_results_without_a_set_are_named(tmp_path, capsys):
    run = run_of(tmp_path / "run", {"scan": SCAN})
    assert cli.main(["eval", "--table", str(run), "--set", "hard"]) == 2
    assert f"holds no results on the hard set: run `trace-jax eval --run-dir {run} --set hard` first" in (
        capsys.readouterr().err
    )
    assert CONFIG.set == ""


@pytest.mark.slow
def test_the_hard_set_is_what_it_was():
    """By its answers: tests compile without optimisation, which rounds some counts of the tables otherwise."""
    assert described(load_split(sets.applied(HARD), "test"))["answers"] == ANSWERS
