"""Configuration files: strict types, nearest names, refused combinations, and the round trip."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_rules import CHOICES, RANGES, validate

CONFIGS = Path(__file__).parent.parent / "configs"


def load(tmp_path, text, *overrides):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return config_io.load(path, overrides)


def refusal(call, *args):
    with pytest.raises(ConfigError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configs_load_and_round_trip(path, tmp_path):
    config = config_io.load(path)
    assert config.name == path.stem
    assert load(tmp_path, config_io.dump(config)) == config


def test_fields_not_given_keep_their_defaults(tmp_path):
    config = load(tmp_path, "grpo: {steps: 7, optimizer: {learning_rate: 1e-5}}")
    expected = RunConfig()
    optimizer = dataclasses.replace(expected.grpo.optimizer, learning_rate=1e-5)
    assert config == expected.replace(grpo=dataclasses.replace(expected.grpo, steps=7, optimizer=optimizer))


def test_overrides_win_over_the_file(tmp_path):
    config = load(tmp_path, "grpo: {steps: 7}", ("grpo.steps", "9"), ("name", "12"), ("policy.remat", "true"))
    assert (config.grpo.steps, config.name, config.policy.remat) == (9, "12", True)


def test_types_are_kept_exactly(tmp_path):
    config = load(tmp_path, "sft: {optimizer: {learning_rate: 1}}")
    assert type(config.sft.optimizer.learning_rate) is float


@pytest.mark.parametrize(
    ("text", "named", "mend"),
    [
        ("grpo: {step: 7}", "grpo.step", "grpo.steps"),
        ("grppo: {steps: 7}", "grppo", "grpo"),
        ("learning_rate: 1", "learning_rate", "sft.optimizer.learning_rate"),
        ("zzzqqq: 1", "zzzqqq", "valid here: name, seed"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path, text, named, mend):
    message = refusal(load, tmp_path, text)
    assert f"`{named}`" in message and mend in message and "c.yaml" in message


def test_unknown_override_names_the_nearest(tmp_path):
    message = refusal(load, tmp_path, "", ("rollout.contxt", "9"))
    assert "`rollout.context`" in message and "command line" in message


@pytest.mark.parametrize(
    "text",
    [
        "grpo: {steps: 7.0}",
        "grpo: {steps: '7'}",
        "grpo: {steps: true}",
        "grpo: {steps: }",
        "grpo: 7",
        "grpo:",
        "policy: {remat: 1}",
        "policy: {remat: 'yes'}",
        "name: 7",
        "rollout: {temperature: hot}",
        "rollout: {temperature: .nan}",
        "rollout: {temperature: .inf}",
        "rollout: {temperature: true}",
        "rollout: {temperature: [1.0]}",
    ],
)
def test_wrong_type_is_refused(tmp_path, text):
    assert "`" in refusal(load, tmp_path, text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seed: 1\nseed: 2", "given twice"),
        ("a: [1", "cannot parse"),
        ("- 1", "section"),
        ("? [1, 2]\n: 3", "plain names"),
        ("seed: !!python/object:os.system x", "cannot parse"),
    ],
)
def test_malformed_file_is_refused(tmp_path, text, part):
    assert part in refusal(load, tmp_path, text)


def test_missing_file_names_a_similar_one(tmp_path):
    (tmp_path / "nano.yaml").write_text("")
    assert "nano.yaml" in refusal(config_io.load, tmp_path / "nanno.yaml")
    assert "no directory" in refusal(config_io.load, tmp_path / "missing" / "nano.yaml")
    assert "cannot read" in refusal(config_io.load, tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refusal(config_io.load, tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    "override",
    [
        ("rollout.context", "1024"),  # above policy.max_length: answers would be cut
        ("sft.microbatch.row_length", "256"),  # below rollout.context
        ("grpo.microbatch.row_length", "256"),
        ("rollout.max_turn_tokens", "512"),
        ("policy.kv_heads", "3"),
        ("policy.head_dim", "31"),
        ("simulator.days", "27"),
        ("mesh.data", "0"),
        ("mesh.data", "-2"),
        ("grpo.objective", "ppo"),
        ("grpo.group", "1"),
        ("grpo.prompts", "5000"),
        ("grpo.validation_episodes", "529"),
        ("rollout.temperature", "0"),  # greedy rollouts have no log-probability to train on
        ("evaluation.temperature", "0"),
        ("sft.batch", "20000"),
        ("name", "a/b"),
        ("seed", "-1"),
    ],
    ids=lambda o: "=".join(o),
)
def test_invalid_values_and_combinations_are_refused(override):
    message = refusal(config_io.load, None, [override])
    assert f"`{override[0]}`" in message and override[1] in message


def test_every_rule_names_a_field_and_every_number_has_a_rule():
    leaves = dict(config_io.flatten(RunConfig()))
    rules = set(CHOICES) | set(RANGES)
    assert rules <= leaves.keys()
    numbers = {n for n, v in leaves.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    assert numbers - rules <= {"mesh.data"}  # checked among the combinations
    validate(RunConfig())


def test_differences_names_the_changed_fields():
    a = RunConfig()
    b = a.replace(seed=1, grpo=dataclasses.replace(a.grpo, steps=1))
    assert config_io.differences(a, b) == ["seed", "grpo.steps"]


def test_dump_is_plain_yaml():
    assert yaml.safe_load(config_io.dump(RunConfig()))["policy"]["rope_theta"] == 10000.0
