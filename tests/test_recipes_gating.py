"""Gates over adapters as runs: what is refused, how mixtures are told, one trained and evaluated on a finished run."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from recipes_helpers import compile_cache, final_state, finished_smoke, records, smoke

from trace_jax import cli, config_io
from trace_jax.config import ConfigError, LoraConfig, PolicyConfig, RunConfig
from trace_jax.recipes import adapter_runs, adapters, gating, train
from trace_jax.rollout.trajectory import Trajectory, read_parquet

__all__ = ["compile_cache", "finished_smoke", "smoke"]  # fixtures


def run(capsys, *words):
    status = cli.main([*map(str, words)])
    out, err = capsys.readouterr()
    return status, out, err


def trajectory(task, weights):
    ids = np.zeros(3, np.int32)
    info = {} if weights is None else {"gate": weights}
    return Trajectory(ids, ids > 0, np.zeros(3, np.float32), ids, (0,), "finished", task, info=info)


def test_mixtures_are_means_by_layer_and_by_episode():
    one = trajectory(4, [[0.2, 0.3, 0.5], [0.6, 0.2, 0.2]])
    two = trajectory(4, [[0.2, 0.3, 0.5], [0.8, 0.0, 0.2]])
    three = trajectory(9, [[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
    found = gating.mixtures([one, two, three, trajectory(10, None)], ("a", "b"))
    assert found["adapters"] == ["a", "b", "base"]
    np.testing.assert_allclose(found["by_layer"], [[0.2, 0.3, 0.5], [0.5, 0.1, 0.4]])
    assert [e["task"] for e in found["episodes"]] == [4, 9]
    np.testing.assert_allclose(found["episodes"][0]["weights"], [0.45, 0.2, 0.35])
    text = gating.markdown(found)
    assert "| layer 2 | 0.500 | 0.100 | 0.400 |" in text
    assert "| the largest, share of episodes | 50% | 0% | 50% |" in text
    told = gating.figures([one, three, trajectory(10, None)], ("a", "b"))
    assert told == pytest.approx({"gate/a": 1.1 / 4, "gate/b": 0.9 / 4, "gate/base": 2.0 / 4})
    assert gating.figures([trajectory(1, None)], ()) == {} and gating.mixtures([], ("a",))["episodes"] == []


def made(path, **loras):
    """Configurations of adapters' runs."""
    for name, cfg in loras.items():
        (path / "adapters" / name).mkdir(parents=True)
        (path / "adapters" / name / "config.yaml").write_text(config_io.dump(RunConfig().replace(lora=cfg)))


def test_a_gate_has_the_adapters_of_its_directory(tmp_path):
    mine = LoraConfig(rank=2, alpha=4.0)
    made(tmp_path, intersection=mine, abstaining=mine, mix=dataclasses.replace(mine, rank=3))
    config = adapters._config(RunConfig(), [], (), "gate")
    assert (config.grpo.optimizer.learning_rate, config.grpo.hints, config.grpo.group) == (1e-3, 0.0, 16)
    found = gating.over(config, [], tmp_path, ["abstaining", "intersection"])
    assert found.lora == dataclasses.replace(mine, gate=("abstaining", "intersection"))
    same = [("lora.rank", "2"), ("lora.alpha", "4")]
    asked = adapters._config(config_io.override(RunConfig(), same), same, (), "gate")
    assert gating.over(asked, same, tmp_path, ["abstaining"]).lora.gate == ("abstaining",)
    for names, overrides, says in (
        ([], [], "has no finished adapter of a capability for a gate to mix"),
        (["abstaining", "mix"], [], "differ in `lora` and cannot be resident together"),
        (["abstaining"], [("lora.rank", "8")], "`lora.rank` is not that of the adapters in"),
    ):
        with pytest.raises(ConfigError, match=says):
            gating.over(config_io.override(config, overrides), overrides, tmp_path, names)
    assert adapter_runs.targeted(["abstaining", "mix", "target"]) == ["abstaining"]
    assert adapter_runs.finished_gates(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lora.rank": "0"}, "`lora.rank` is 0: leave it out"),
        ({"grpo.turn_credit.enabled": "true"}, "`grpo.turn_credit` does not go with `lora.gate`"),
    ],
)
def test_what_a_gate_does_not_go_with(changes, says):
    fields = {"lora.rank": "2", "lora.gate": "[a]", "grpo.turn_credit.enabled": "false", **changes}
    with pytest.raises(ConfigError, match=says):
        config_io.override(RunConfig(), list(fields.items()))


def test_adapters_of_single_experts_are_not_mixed():
    policy = PolicyConfig(experts=4, experts_per_token=2, expert_width=16, mlp_width=0)
    config = RunConfig().replace(policy=policy)
    fields = [("lora.rank", "2"), ("lora.targets", "[query, expert_up]")]
    config_io.override(config, fields)
    with pytest.raises(ConfigError, match="cannot mix adapters of single experts .expert_up."):
        config_io.override(config, [*fields, ("lora.gate", "[a]")])


@pytest.mark.parametrize("command", ["sft", "train"])
def test_a_gate_is_trained_by_grpo_alone(command, tmp_path, capsys):
    words = [command, "--run-dir", tmp_path / "run", "--lora.rank", 2, "--lora.gate", "[a]"]
    status, _, err = run(capsys, *words)
    assert status == 2 and "is trained by GRPO alone" in err and len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_the_field_is_set_by_the_command_alone():
    config = config_io.override(RunConfig(), [("lora.rank", "2"), ("lora.gate", "[a]")])
    with pytest.raises(ConfigError, match="is what `--capabilities gate` sets: leave the field out"):
        adapters._check(RunConfig(), config)


def test_a_gate_without_adapters_is_no_run(tmp_path):
    config = config_io.override(RunConfig(), [("lora.rank", "2"), ("lora.gate", "[a]")])
    made(tmp_path, base=LoraConfig())
    with pytest.raises(ConfigError, match="needs adapters to mix: train it with `trace-jax capability train"):
        train.command("grpo", tmp_path / "run", config, resume=False, source=tmp_path / "adapters" / "base")
    made(tmp_path, gate=config.lora)
    with pytest.raises(ConfigError, match="is a gate over adapters, which no other run can begin with"):
        train.command("grpo", tmp_path / "run", config, resume=False, source=tmp_path / "adapters" / "gate")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_gate_over_two_adapters(smoke, capsys):
    """It trains after them in one command, begins uniform, changes, goes on exactly, is evaluated beside them on the
    same episodes, and is not exported; adapters that were trained anew are not what it mixes."""
    path, _ = smoke
    (path / "capability").mkdir(exist_ok=True)
    worlds = {name: {"accepted": True, "level": 0.0, "tries": []} for name in ("abstaining", "drill_down")}
    (path / "capability" / "worlds.json").write_text(json.dumps({"settings": {}, "worlds": worlds}))
    fields = ["--grpo.prompts", 2, "--grpo.group", 4, "--grpo.validation_episodes", 0, "--grpo.save_every", 1]
    fields += ["--lora.rank", 2, "--grpo.optimizer.learning_rate", 0.02, "--grpo.constant_groups", "count"]
    # rewards of so small a policy may all be 0: the entropy gives every step a gradient
    fields += ["--grpo.steps", 2, "--grpo.hints", 0, "--grpo.entropy_coefficient", 0.1]
    words = ["capability", "train", "--run-dir", path, *fields, "--capabilities"]
    status, out, err = run(capsys, *words, "gate", "abstaining", "drill_down", "--json")
    assert status == 0, err
    told = json.loads(out.splitlines()[-1])["adapters"]
    assert list(told) == ["abstaining", "drill_down", "gate"] and told["gate"]["worlds"] == []

    folder = path / "capability" / "adapters" / "gate"
    first, second = (read_parquet(folder / "trajectories" / f"grpo-00000{n}.parquet") for n in (1, 2))
    uniform = np.full_like(first[0].info["gate"], 1 / 3)
    assert all(np.allclose(t.info["gate"], uniform, atol=1e-4) for t in first)
    moved = [np.abs(np.array(t.info["gate"]) - uniform).max() for t in second]
    assert max(moved) > 0.01
    steps = [r for r in records(folder) if r["stage"] == "grpo"]
    assert steps[0]["gate/base"] == pytest.approx(1 / 3, abs=1e-4) and steps[0]["mismatch_gap"] < 1e-4
    assert steps[1]["mismatch_gap"] < 1e-4 and steps[1]["grad_norm"] > 0

    state, _ = final_state(folder)
    shutil.rmtree(folder / "checkpoints" / "grpo" / "00000002")
    status, _, err = run(capsys, "grpo", "--run-dir", folder, "--resume")
    assert status == 0, err
    again, _ = final_state(folder)
    assert state.keys() == again.keys() and all(np.array_equal(state[k], again[k]) for k in state)
    assert run(capsys, *words, "gate")[0] == 0  # nothing to do

    status, out, err = run(
        capsys, "capability", "eval", "--run-dir", path, "--agents", "base", "gate", "--evaluation.samples", 1
    )
    assert status == 0, err
    logged = json.loads((path / "capability" / "gate.json").read_text())
    answers = (path / "capability" / "evaluation" / "gate.jsonl").read_text().splitlines()
    assert logged["adapters"] == ["abstaining", "drill_down", "base"] and len(logged["episodes"]) == len(answers) > 0
    assert "| weights of the gate | abstaining | drill_down | base |" in out
    np.testing.assert_allclose(np.sum([e["weights"] for e in logged["episodes"]], 1), 1.0, atol=1e-3)

    words_of = ["inspect", "--trajectory", folder / "trajectories" / "grpo-000002.parquet", "--index", 0, "--json"]
    status, out, err = run(capsys, *words_of)
    assert status == 0 and json.loads(out.splitlines()[-1])["logprobs"], err

    for form, says in (("peft", "PEFT has no form for a gate"), ("hf", "export the adapters one by one")):
        status, _, err = run(capsys, "export", "--run-dir", folder, "--format", form, "--out", path / "out")
        assert status == 2 and says in err and len(err.splitlines()) == 1
    status, _, err = run(capsys, "grpo", "--init", folder, "--run-dir", path.parent / "next")
    assert status == 2 and "is a gate over adapters, which no other run can begin with" in err

    shutil.rmtree(path / "capability" / "adapters" / "drill_down")
    assert run(capsys, *words, "drill_down", "--seed", 5)[0] == 0
    status, _, err = run(capsys, "capability", "eval", "--run-dir", path, "--agents", "gate", "--evaluation.samples", 1)
    assert status == 2 and "as it was before it was trained anew" in err and len(err.splitlines()) == 1
