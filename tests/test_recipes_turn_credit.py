"""GRPO with turn credit: what reaches the learner, what is logged, how it resumes, and how it is looked at."""

import json

import numpy as np
import pytest
from recipes_helpers import compile_cache, figures, final_state, finished_smoke, records, smoke

from trace_jax import cli
from trace_jax.config import ConfigError, TurnCreditConfig
from trace_jax.learner import turn_credit
from trace_jax.recipes import grpo
from trace_jax.rollout.trajectory import read_parquet

__all__ = ["compile_cache", "finished_smoke", "smoke"]  # fixtures
ON = ["--grpo.turn_credit.enabled", "true"]


def run(*words):
    assert cli.main([str(w) for w in words]) == 0


def test_a_run_with_turn_credit(smoke, tmp_path, capsys, monkeypatch):
    """Every trajectory has a value for each boundary; they are the reference's, whatever has been learned since; a
    resumed run is the same to the bit; a person can see what each turn was worth."""
    source, _ = smoke
    argv = ["grpo", "--init", source, "--grpo.steps", 3, "--grpo.staleness", 1, "--grpo.save_every", 1, *ON]
    seen = []
    build = grpo.grpo_sequences
    monkeypatch.setattr(grpo, "grpo_sequences", lambda t, *a: seen.append(t) or build(t, *a))
    run(*argv, "--run-dir", tmp_path / "whole")
    assert len(seen) == 3
    for trajectories in seen:
        for t in trajectories:
            assert len(t.probes) == len(turn_credit.boundaries(t.turn_index, t.loss_mask)) and max(t.probes) <= 0
    rows = [r for r in records(tmp_path / "whole") if r["stage"] == "grpo"]
    # not below 1: a step whose trajectories were probed ahead of it may be shorter than their probing
    assert all(r["seconds/probe"] > 0 and r["credit/probe_share"] > 0 for r in rows)
    assert all(r["credit/value_last"] is not None and 0 <= r["credit/positive"] <= 1 for r in rows)

    stopped = iter([False, True])
    with monkeypatch.context() as patch:
        save = grpo._Loop._save

        def fail(loop, step):
            save(loop, step)
            if next(stopped, False):
                raise ConfigError("stopped here")

        patch.setattr(grpo._Loop, "_save", fail)
        assert cli.main([str(w) for w in [*argv, "--run-dir", tmp_path / "cut"]]) == 2
    run("grpo", "--run-dir", tmp_path / "cut", "--resume")
    whole, cut = (final_state(tmp_path / name)[0] for name in ("whole", "cut"))
    for name, value in whole.items():
        np.testing.assert_array_equal(cut[name], value, err_msg=name)
    names = ("credit/value_last", "credit/mean", "credit/reward_correlation", "loss", "grad_norm")
    kept = [[{k: r[k] for k in names} for r in figures(tmp_path / n) if r["stage"] == "grpo"] for n in ("whole", "cut")]
    assert kept[0] == kept[1]

    file = tmp_path / "whole" / "trajectories" / "grpo-000003.parquet"
    capsys.readouterr()
    run("inspect", "--trajectory", file, "--index", 1, "--json")
    printed = capsys.readouterr().out.splitlines()
    told, t = json.loads(printed[-1]), read_parquet(file)[1]
    assert told["logprobs"] == list(t.probes) and len(told["turns"]) == t.turn_index.max() + 1
    paid = [turn for turn in told["turns"] if turn["credit"] is not None]
    assert len(paid) == len(t.probes) - 1
    assert any(line.startswith("truth") for line in printed) and any(line.startswith("turn 1") for line in printed)
    np.testing.assert_allclose(sum(turn["delta"] for turn in paid), told["values"][-1], atol=1e-9)

    # a run without turn credit is asked on the spot
    run("inspect", "--trajectory", source, "--json")
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["logprobs"]) >= 1


@pytest.mark.slow
def test_measuring_alone_changes_nothing(smoke, tmp_path):
    """With coefficient 0 the run is plain GRPO, to the bit."""
    source, _ = smoke
    argv = ["grpo", "--init", source, "--grpo.steps", 2, "--grpo.validation_episodes", 0, "--grpo.keep_best", 0]
    run(*argv, "--run-dir", tmp_path / "plain")
    run(*argv, *ON, "--grpo.turn_credit.coefficient", 0, "--run-dir", tmp_path / "measured")
    plain, measured = (final_state(tmp_path / name)[0] for name in ("plain", "measured"))
    for name, value in plain.items():
        np.testing.assert_array_equal(measured[name], value, err_msg=name)


@pytest.mark.slow
def test_one_copy_serves_the_penalty_and_turn_credit(smoke, tmp_path, monkeypatch):
    """The arrays that the KL penalty pulls to are the probe's own, and the probe says what it says with a copy."""
    source, _ = smoke
    argv = ["grpo", "--init", source, "--grpo.steps", 1, "--grpo.validation_episodes", 0, "--grpo.keep_best", 0, *ON]
    run(*argv, "--run-dir", tmp_path / "copy")
    held = []
    made, update = grpo.TurnProbe.__init__, grpo.update
    monkeypatch.setattr(grpo.TurnProbe, "__init__", lambda probe, *a, **k: made(probe, *a, **k) or held.append(probe))
    monkeypatch.setattr(grpo, "update", lambda *a, **k: held.append(a[4]) or update(*a, **k))
    run(*argv, "--grpo.kl_coefficient", 1e-3, "--run-dir", tmp_path / "shared")
    probe, anchor = held
    assert probe._probe._params is anchor
    copy, shared = (read_parquet(tmp_path / n / "trajectories" / "grpo-000001.parquet") for n in ("copy", "shared"))
    assert [t.probes for t in copy] == [t.probes for t in shared]


@pytest.mark.slow
def test_another_run_as_reference(smoke, tmp_path, capsys):
    """Its newest policy is copied and stays the reference; one that reads other tokens is refused."""
    source, _ = smoke
    argv = ["grpo", "--init", source, "--grpo.steps", 1, "--grpo.validation_episodes", 0, "--grpo.keep_best", 0, *ON]
    run(*argv, "--run-dir", tmp_path / "first")
    run(*argv, "--grpo.turn_credit.reference", source, "--run-dir", tmp_path / "later")
    first, later = (read_parquet(tmp_path / n / "trajectories" / "grpo-000001.parquet") for n in ("first", "later"))
    assert [t.ids.tolist() for t in first] == [t.ids.tolist() for t in later]
    assert any(a.probes != b.probes for a, b in zip(first, later, strict=True))
    assert (tmp_path / "later" / "checkpoints" / "reference").is_dir()

    (source / "tokenizer.model").write_bytes(b"another")
    fresh = ["--grpo.turn_credit.reference", source, "--run-dir", tmp_path / "refused"]
    capsys.readouterr()
    argv[2] = tmp_path / "first"
    assert cli.main([str(w) for w in [*argv, *fresh]]) == 2
    assert "another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--grpo.turn_credit.form", "raw_delta"], "without effect: set grpo.turn_credit.enabled to true"),
        ([*ON, "--grpo.turn_credit.coefficient", "0", "--grpo.turn_credit.terminal_fill", "1"], "only measured"),
        ([*ON, "--grpo.turn_credit.form", "delta"], "choose one of log_ratio"),
        ([*ON, "--grpo.constant_groups", "drop"], "set grpo.constant_groups to count"),
        ([*ON, "--grpo.turn_credit.microbatch.row_length", "128"], "must exceed `rollout.context`"),
        ([*ON, "--grpo.turn_credit.reference", "nowhere"], "nowhere"),
        ([*ON, "--grpo.turn_credit.epsilon", "0"], "must be above 0"),
        (
            [*ON, "--grpo.objective", "gspo", "--grpo.aggregation", "seq_mean_token_mean"]
            + ["--grpo.clip_low", "3e-4", "--grpo.clip_high", "4e-4"],
            "set grpo.objective to gspo_token",
        ),
    ],
)
def test_refused(words, says, tmp_path, capsys):
    argv = ["train", "--config", "configs/smoke.yaml", "--run-dir", str(tmp_path / "run"), *words]
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1 and not (tmp_path / "run").exists()


def test_the_default_is_off():
    assert not TurnCreditConfig().enabled and not TurnCreditConfig().pays
