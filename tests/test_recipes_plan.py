"""The plan of `grpo --dry-run`: sizes and memory against what is really allocated, answers that limits cut off."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
import yaml
from flax import nnx
from helpers_episodes import fake_batch
from jax.sharding import AbstractMesh
from recipes_helpers import compile_cache, finished_smoke

from trace_jax import cli
from trace_jax.config import BatchConfig, ConfigError, GRPOConfig, PolicyConfig, RolloutConfig, RunConfig
from trace_jax.learner import objectives, packing, sharding
from trace_jax.learner.step import Learner, transformer_logprobs
from trace_jax.policy import cache
from trace_jax.policy.transformer import Transformer, logical_axes
from trace_jax.recipes import domain, plan, plan_probe
from trace_jax.recipes.plan_memory import Sizes, estimate
from trace_jax.rollout.trajectory import Trajectory

__all__ = ["compile_cache", "finished_smoke"]  # fixtures

POLICY = PolicyConfig(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, mlp_width=128, max_length=128)
CONFIG = RunConfig(
    policy=POLICY,
    rollout=RolloutConfig(context=100, slots=6, max_turns=4, max_turn_tokens=10),
    grpo=GRPOConfig(microbatch=BatchConfig(row_length=128, rows=8)),
)
VOCABULARY = 300


@pytest.fixture(scope="module")
def learner():
    model = Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    mesh = sharding.make_mesh(CONFIG.mesh, jax.devices()[:1])
    objective = objectives.grpo_objective(CONFIG.grpo)
    made = Learner(transformer_logprobs(graphdef), objective, CONFIG.grpo.optimizer, 10, mesh, logical_axes(model))
    return made, made.init(params)


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_what_can_be_counted_is_exact(learner):
    made, state = learner
    found = estimate(CONFIG, VOCABULARY, made.mesh, made.mesh)
    assert found["parameters"] == nbytes(state.params)
    assert Sizes.of(CONFIG, VOCABULARY).count == sum(x.size for x in jax.tree.leaves(state.params))
    assert found["moments"] == pytest.approx(nbytes(state.opt_state), abs=64)  # and Adam's count
    slots, context = CONFIG.rollout.slots, CONFIG.rollout.context
    assert found["kv_cache"] == nbytes(jax.eval_shape(lambda: cache.new(POLICY, slots, context)))
    batch = packing.empty_batch(128, 8)
    assert found["batch"] == 2 * nbytes(batch)
    assert found["learner"] + found["sampler"] == found["total"]
    assert found["sampler_parameters"] == found["reference"] == found["versions"] == 0  # it reads the learner's


def test_activations_are_about_what_the_compiler_allocates(learner):
    made, state = learner
    found = estimate(CONFIG, VOCABULARY, made.mesh, made.mesh)
    allocated = made.lowered(state.params, packing.empty_batch(128, 8)).compile().memory_analysis().temp_size_in_bytes
    counted = found["activations"] + found["scores"] + found["gradients"] / 2
    assert allocated / 2 < counted < 2 * allocated, (counted, allocated)


def test_memory_is_divided_as_the_mesh_divides_it():
    axes = ("data", "fsdp", "tensor", "expert")
    mesh, lone = AbstractMesh((2, 4, 2, 1), axes), AbstractMesh((1, 1, 1, 1), axes)
    kl = dataclasses.replace(CONFIG, grpo=dataclasses.replace(CONFIG.grpo, kl_coefficient=0.1, staleness=1))
    found, whole = estimate(kl, VOCABULARY, mesh, mesh), estimate(kl, VOCABULARY, lone, lone)
    # by hand: matrices are split eight ways (embed over fsdp, heads, mlp and vocabulary over tensor), gains of the
    # width four ways, those of heads on every device
    matrices = VOCABULARY * 64 + 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
    assert found["parameters"] == 4 * (matrices / 8 + 5 * 64 / 4 + 2 * 2 * 16)
    assert found["sampler_parameters"] == 4 * (matrices / 2 + 5 * 64 + 2 * 2 * 16)  # a lane has all but tensor's share
    assert found["reference"] == found["parameters"] and found["versions"] == 2 * found["parameters"]
    assert found["kv_cache"] == whole["kv_cache"] / 6 / 2  # 6 slots over 8 lanes: one each, half of its heads
    assert found["scores"] == whole["scores"] / 8 / 2  # 1,024 tokens over 8 devices, the vocabulary over 2
    apart = estimate(kl, VOCABULARY, mesh, lone)
    assert apart["total"] == max(apart["learner"], apart["sampler"]) and apart["sampler_parameters"] > 0


def test_a_reference_of_turn_credit_that_is_the_anchor_of_the_penalty_is_held_once():
    def probed(**grpo):
        turns = dataclasses.replace(CONFIG.grpo.turn_credit, enabled=True, reference=grpo.pop("reference", ""))
        return dataclasses.replace(CONFIG, grpo=dataclasses.replace(CONFIG.grpo, turn_credit=turns, **grpo))

    mesh = AbstractMesh((1, 1, 1, 1), ("data", "fsdp", "tensor", "expert"))

    def held(config):
        found = estimate(config, VOCABULARY, mesh, mesh)
        return [found[name] // found["parameters"] for name in ("reference", "probe_reference")]

    assert held(CONFIG) == [0, 0] and held(probed()) == [0, 1]
    assert held(probed(kl_coefficient=0.1)) == [1, 0]
    assert held(probed(kl_coefficient=0.1, reference="runs/other")) == [1, 1]
    apart = dataclasses.replace(probed(kl_coefficient=0.1), mesh=dataclasses.replace(CONFIG.mesh, rollout_devices=1))
    assert held(apart) == [1, 1]


def trajectory(turns, status="truncated", length=None, turn_tokens=3):
    """Two tokens of prompt, then turns of `turn_tokens` sampled ones, each but the last with an observation of two."""
    index = [-1, -1]
    mask = [False, False]
    for k in range(turns):
        last = k == turns - 1
        index += [k] * (turn_tokens + 2 * (not last))
        mask += [True] * turn_tokens + [False] * 2 * (not last)
    if length:  # the rest belongs to the first prompt
        index, mask = [-1] * (length - len(index)) + index, [False] * (length - len(mask)) + mask
    n = len(index)
    ids, zeros = np.zeros(n, np.int32), np.zeros(n, np.float32)
    return Trajectory(ids, np.array(mask), zeros, np.array(index, np.int32), (0,) * turns, status, task_index=0)


CUT = {
    "max_turns": trajectory(4),
    "max_turn_tokens": trajectory(2, turn_tokens=10),
    "context": trajectory(2, length=100),
}


def test_which_limit_cut_a_trajectory_off():
    for name, cut in CUT.items():
        assert plan_probe.cut_by(cut, CONFIG.rollout) == name
    assert plan_probe.cut_by(trajectory(2, length=98), CONFIG.rollout) == "context"  # an observation did not fit
    assert plan_probe.cut_by(trajectory(4, "finished"), CONFIG.rollout) is None


@pytest.mark.parametrize("name", CUT)
def test_a_first_step_of_cut_off_answers_is_refused(name, tmp_path):
    fine = [trajectory(2, "finished")] * 3
    plan.check_truncation([*fine, *[CUT[name]] * 3], CONFIG, tmp_path)  # half of them: unpleasant, allowed
    begun = getattr(CONFIG.rollout, name)
    with pytest.raises(ConfigError, match=rf"`rollout.{name}` \({begun}\) cut off 57% .*--rollout.{name} {2 * begun}`"):
        plan.check_truncation([*fine, *[CUT[name]] * 4], CONFIG, tmp_path)


def config_of(tmp_path, **changes):
    """A file of tiny sizes, with limits that the analyst's transcripts fit."""
    sections = {
        "simulator": {"segments": 24, "batch": 64},
        "policy": {
            "layers": 1,
            "width": 16,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 8,
            "mlp_width": 16,
            "max_length": 2048,
        },
        "rollout": {"context": 2048, "max_turn_tokens": 1024, "max_turns": 12},
        "sft": {"microbatch": {"row_length": 2048}},
        "grpo": {"microbatch": {"row_length": 2048}},
    }
    sections["rollout"] |= changes
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(sections))
    return str(path)


def test_limits_that_the_analyst_exceeds_are_refused_with_ones_that_do(tmp_path, monkeypatch, capsys):
    # hand-made episodes: the simulator takes long to compile, and their tables are as good to write transcripts about
    monkeypatch.setattr(domain, "accepted_episodes", lambda *_, **__: fake_batch(10, days=28, segments=12))
    monkeypatch.chdir(tmp_path)
    argv = ["grpo", "--dry-run", "--json", "--config", config_of(tmp_path)]
    assert cli.main(argv) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert yaml.safe_load("\n".join(text))["rollout"]["max_turns"] == 12  # the plan is a comment in it
    told = json.loads(last)
    assert {"config", "parameters", "tokens_per_step", "memory", "truncation"} <= told.keys()
    assert told["config"]["rollout.max_turns"] == 12 and told["truncation"]["share"] == 0
    needs = told["truncation"]["needs"]
    tokens = told["tokens_per_step"]
    assert 0 < tokens["sampled"] < tokens["expected"] < tokens["most"] == 32 * 8 * 2048
    assert f"{told['parameters']:,}" in "\n".join(text)

    tight = {"max_turn_tokens": max(needs["rollout.max_turn_tokens"] // 8, 2), "max_turns": 2}
    argv = ["grpo", "--dry-run", "--config", config_of(tmp_path, **tight)]
    assert cli.main(argv) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "would cut off" in said and "analyst" in said
    mend = said.partition("e.g. ")[2].split()
    assert dict(zip(mend[::2], map(int, mend[1::2]), strict=True)) == {
        "--rollout.max_turns": needs["rollout.max_turns"],
        "--rollout.max_turn_tokens": needs["rollout.max_turn_tokens"],
    }
    assert cli.main([*argv, *mend]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["c.yaml"]


def test_fields_that_must_follow_a_longer_context():
    raised = plan._raised(CONFIG, {"max_turns": 3, "max_turn_tokens": 40, "context": 150}, "analyst")
    assert raised == {
        "rollout.max_turn_tokens": 40,
        "rollout.context": 150,
        "policy.max_length": 150,
        "grpo.microbatch.row_length": 150,
    }
    assert plan._raised(CONFIG, {"max_turns": 3, "max_turn_tokens": 120, "context": 90}, "policy") == {
        "rollout.max_turn_tokens": 120,
        "rollout.context": 121,
    }


def tree(path):
    return {p: p.stat().st_mtime_ns for p in sorted(path.rglob("*"))}


def test_a_runs_policy_is_asked_itself(finished_smoke, capfd):
    run, _ = finished_smoke
    before = tree(run)
    assert cli.main(["grpo", "--dry-run", "--json", "--init", str(run), "--grpo.steps", "7"]) == 0
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert told["truncation"]["source"] == "policy" and told["truncation"]["share"] <= 0.5
    assert told["optimizer_steps"] == 14 and told["tokens_per_step"]["most"] == 2 * 4 * 896
    assert cli.main(["grpo", "--dry-run", "--init", str(run), "--rollout.max_turn_tokens", "3"]) == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert re.search(r"`rollout.max_turn_tokens` \(3\) would cut off \d+% of the policy's answers: raise it", said), (
        said
    )
    assert cli.main(["grpo", "--dry-run", "--run-dir", str(run), "--policy.width", "64"]) == 2
    assert "`policy.width` cannot change any more" in capfd.readouterr().err
    assert tree(run) == before
