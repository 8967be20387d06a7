"""The configurations of open models: sizes, and that an import takes them."""

import dataclasses
from pathlib import Path

import pytest

from trace_jax import config_io
from trace_jax.config_rules_policy import parameters
from trace_jax.learner import credit, objectives
from trace_jax.policy import hf
from trace_jax.policy.hf_config import RUNTIME
from trace_jax.recipes.import_model import Checkpoint, configuration

CONFIGS = Path(__file__).parent.parent / "configs"
# Counted by `transformers` 5.24 on its meta device, from the published sizes.
MODELS = {
    "smollm2_135m": ("llama", 134_515_008, 8192),
    "qwen3_0_6b": ("qwen3", 596_049_920, 40960),
    "qwen3_4b": ("qwen3", 4_022_468_096, 40960),
    "qwen3_30b_a3b": ("qwen3_moe", 30_532_122_624, 40960),
    "qwen3_5_35b_a3b": ("qwen3_5_moe_text", 34_660_610_688, 262_144),
}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_and_the_import_of_such_a_model(name):
    kind, count, longest = MODELS[name]
    file = CONFIGS / f"{name}.yaml"
    config = config_io.load(file)
    policy = config.policy
    assert config.name == name and parameters(policy, policy.vocab_size) == count
    settings = hf.config_json(dataclasses.replace(policy, max_length=longest), policy.vocab_size)
    assert settings["model_type"] == kind
    theirs = hf.policy_config(settings)
    assert configuration(Checkpoint(Path(name), theirs, None, {}, None), file, ()) == config
    fixed = {f.name for f in dataclasses.fields(policy)} - set(RUNTIME)
    assert all(getattr(theirs, field) == getattr(policy, field) for field in fixed)
    objectives.validate(config.grpo)
    credit.validate(config.grpo, config.rollout.context)
    ways = config.mesh.fsdp
    assert config.grpo.microbatch.rows % ways == config.sft.microbatch.rows % ways == 0
    assert policy.kv_heads % config.mesh.tensor == 0 and policy.experts % config.mesh.expert == 0


# Configurations of pods (the number after the chip counts chips) and those they have their policy from.
PODS = {
    "qwen3_0_6b_v5e8": "qwen3_0_6b",
    "qwen3_30b_a3b_v5p64": "qwen3_30b_a3b",
    "qwen3_5_35b_a3b_v5p128": "qwen3_5_35b_a3b",
    "qwen3_5_35b_a3b_v5e256": "qwen3_5_35b_a3b",
    "qwen3_4b_h200x8": "qwen3_4b",
    "qwen3_30b_a3b_h200x16": "qwen3_30b_a3b",
}


@pytest.mark.parametrize("name", PODS)
def test_a_pod_trains_the_whole_policy_at_the_scale_of_the_paper(name):
    config, whose = (config_io.load(CONFIGS / f"{n}.yaml") for n in (name, PODS[name]))
    for field in set(dataclasses.asdict(config.policy)) - set(RUNTIME):
        assert getattr(config.policy, field) == getattr(whose.policy, field), field
    assert not config.lora.rank and config.policy.param_dtype == "float32"
    assert (config.grpo.prompts, config.grpo.group, config.rollout.context) == (32, 8, 32768)
    chips = int(name.rpartition("_")[2].lstrip("vh").partition("x")[2] or name.rpartition("_")[2][3:])
    mesh = config.mesh
    assert chips % (mesh.fsdp * mesh.tensor * mesh.expert) == 0
    ways = chips // (mesh.tensor * mesh.expert)
    assert config.grpo.microbatch.rows % ways == config.sft.microbatch.rows % ways == 0
    objectives.validate(config.grpo)
    credit.validate(config.grpo, config.rollout.context)
