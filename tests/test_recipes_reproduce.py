"""Studies: the table's arithmetic against a closed form, and a whole small study."""

import json
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from recipes_helpers import compile_cache, finished_smoke, smoke

from trace_jax import cli, config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.learner.objectives import validate
from trace_jax.recipes import reproduce
from trace_jax.recipes.reproduce_table import SMOOTH, interval, markdown, steps_to_reach, summary
from trace_jax.recipes.studies import STUDIES

__all__ = ["compile_cache", "finished_smoke", "smoke"]  # fixtures


def test_interval():
    """Half-width for 1, 2, 3 is t(2) s / sqrt 3 = 4.303 / sqrt 3."""
    found = interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0 and found["half"] == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert interval([5.0]) == {"mean": 5.0, "half": None}


def test_steps_to_reach():
    rewards = [0.0] * 10 + [1.0] * 10
    assert steps_to_reach(rewards, 1.0) == 10 + SMOOTH and steps_to_reach(rewards, 0.2) == 11
    assert steps_to_reach(rewards, 1.1) is None and steps_to_reach([1.0] * (SMOOTH - 1), 0.5) is None


def test_summary_pairs_seeds():
    """Differences are within a seed: seeds that differ much from each other do not blur them."""
    base = {s: {"reward": r, "rewards": [r] * 20, "held_out": None} for s, r in ((0, 0.1), (1, 0.5), (2, 0.9))}
    better = {s: {"reward": r["reward"] + 0.05, "rewards": [r["reward"] + 0.05] * 20} for s, r in base.items()}
    runs = {"A": base, "B": {s: {"held_out": None} | r for s, r in better.items()}}
    found = summary(runs, "A")
    assert found["B"]["reward"]["half"] > 0.5
    assert found["B"]["reward"]["difference"] == pytest.approx(0.05)
    assert found["B"]["reward"]["difference_half"] == pytest.approx(0.0, abs=1e-9)
    assert found["B"]["held_out"] is None and found["A"]["steps_to_reach"]["mean"] == SMOOTH
    text = markdown({"summary": found, "baseline": "A", "runs": runs, "steps": 20})
    assert "+0.050 ± 0.000" in text and text.count("\n|") == 3


@pytest.mark.parametrize("name", STUDIES)
def test_every_variant_is_a_valid_run(name):
    study = STUDIES[name]
    config = RunConfig()
    for variant in study.variants:
        validate(reproduce._config(config, study, variant, None).grpo)
    assert set(study.references) | set(study.references.values()) <= set(study.variants)


@pytest.mark.slow
def test_a_study(smoke, tmp_path, capsys, monkeypatch):
    """Two variants and the one that a reference comes from, one seed; a second call repeats nothing; curves are XML."""
    source, _ = smoke
    out = tmp_path / "study"
    words = ["reproduce", "turn-credit", "--init", source, "--out", out, "--seeds", 1, "--steps", 2]
    words += ["--variants", "log-ratio", "later reference", "--json"]
    words += ["--grpo.prompts", 2, "--grpo.microbatch.rows", 2]
    monkeypatch.setitem(STUDIES["turn-credit"].shape, "prompts", 2)
    monkeypatch.setitem(STUDIES["turn-credit"].shape, "validation_episodes", 2)
    assert cli.main([str(w) for w in words]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(told["runs"]) == {"GRPO", "log-ratio", "later reference"} and told["baseline"] == "GRPO"
    for seeds in told["runs"].values():
        run = seeds["1"]
        assert len(run["rewards"]) == 2 and np.isfinite(run["reward"]) and run["held_out"] is not None
    assert config_io.load(out / "later-reference-1" / "config.yaml").grpo.turn_credit.reference == str(out / "grpo-1")
    ET.fromstring((out / "curves.svg").read_text())
    assert (out / "table.md").read_text().startswith("| |") and json.loads((out / "table.json").read_text())[
        "steps"
    ] == 2

    monkeypatch.setattr(reproduce.train, "command", None)  # would fail: everything is done
    assert cli.main([str(w) for w in words]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == told
    words[words.index("--steps") + 1] = 3
    assert cli.main([str(w) for w in words]) == 2
    assert "is of another study (`grpo." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["turn-credits", "--out", "x"], "turn-credit"),
        (["turn-credit"], "--out"),
        (["turn-credit", "--out", "x", "--variants", "log ratio"], "did you mean 'log-ratio'"),
        (["turn-credit", "--out", "x", "--seeds", "1", "1"], "names one twice"),
        (["turn-credit", "--out", "x", "--steps", "0"], "--steps"),
        (["turn-credit", "--out", "x", "--init", "nowhere"], "nowhere"),
    ],
)
def test_refused(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_override_refuses_what_load_refuses():
    with pytest.raises(ConfigError, match="grpo.steps"):
        config_io.override(RunConfig(), [("grpo.steps", "-1")])
