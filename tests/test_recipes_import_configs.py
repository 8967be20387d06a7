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
