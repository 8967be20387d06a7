"""Configuration files: strict types, nearest names, refused combinations, and the round trip."""

import dataclasses
import math
import re
from pathlib import Path

import jax
import pytest
import yaml
from flax import nnx

from trace_jax import config_io, config_rules, config_rules_policy
from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_rules import CHOICES, RANGES, validate
from trace_jax.policy.transformer import Transformer

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
    assert (config.grpo.steps, config.name, config.policy.remat) == (9, "12", "full")


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
        ("1: 1", "1", "valid here: name, seed"),  # one character resembles `b1` by chance
        ("grpo: {zq: 1}", "grpo.zq", "valid here: grpo.steps"),
        ("a\\nb: 1", "a\\nb", "valid here"),
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
        ("seed: !!bool x", "cannot be read"),
        ("seed: 2024-13-45", "cannot be read"),
        ("seed: " + "9" * 5000, "cannot be read"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("grpo: {clip_low: " + "9" * 400 + "}", "`grpo.clip_low`"),
        ("grpo: {clip_low: 1__0}", "`grpo.clip_low`"),
        ("seed: 0x" + "f" * 5000, "`seed`"),
        ("0x" + "f" * 1000 + ": 1", "unknown key"),
        ("name: " + "[" * 50 + "]" * 50, "`name`"),
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
        ("name", ".."),
        ("name", "-x"),
        ("mesh.data", "70000"),
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


def test_refusals_stay_short_whatever_the_value(tmp_path):
    assert len(refusal(config_io.load, None, [("seed", "9" * 5000)])) < 200
    assert len(refusal(config_io.load, None, [("seed", "9" * 400)])) < 200
    assert len(refusal(load, tmp_path, "k" * 5000 + ": 1")) < 400
    assert len(refusal(load, tmp_path, "policy: {dtype: " + "x" * 5000 + "}")) < 200
    doubled = "".join(f", &x{i + 1} [*x{i}, *x{i}]" for i in range(40))  # 2^40 numbers when written out
    assert len(refusal(load, tmp_path, f"name: [&x0 [1]{doubled}]")) < 200


def test_a_name_with_a_line_break_is_no_path(tmp_path):
    for name in ("a\nb", "a b", "", "x" * 101):
        assert "`name`" in refusal(config_io.load, None, [("name", name)])
    assert config_io.load(None, [("name", "Nano-1.2_b")]).name == "Nano-1.2_b"


def test_merge_keys_bring_fields_that_own_ones_replace(tmp_path):
    text = "sft: {optimizer: &o {eps: 1e-7, b1: 0.5}}\ngrpo: {optimizer: {<<: *o, b1: 0.6}}"
    config = load(tmp_path, text)
    assert (config.grpo.optimizer.eps, config.grpo.optimizer.b1, config.sft.optimizer.b1) == (1e-7, 0.6, 0.5)


@pytest.mark.parametrize("name", sorted(RANGES))
def test_every_number_has_both_ends(name):
    low, high = RANGES[name]
    kind = config_io.field_types(type(config_rules.get(RunConfig(), name.rpartition(".")[0]))) if "." in name else {}
    whole = kind.get(name.rpartition(".")[2], int) is int
    assert f"`{name}`" in refusal(config_io.load, None, [(name, str(int(high) + 1) if whole else str(high * 1.01))])
    assert f"`{name}`" in refusal(config_io.load, None, [(name, "0" if low == ">0" else str(low - 1))])


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False}, {"tie_embeddings": False}])
def test_parameters_are_counted_as_the_policy_has_them(changes):
    policy = dataclasses.replace(RunConfig().policy, layers=3, **changes)
    model = nnx.eval_shape(lambda: Transformer(policy, 300, rngs=nnx.Rngs(0)))
    sizes = [math.prod(p.shape) for p in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert config_rules_policy.parameters(policy, 300) == sum(sizes)


def test_a_policy_far_beyond_the_memory_is_refused_at_start():
    huge = [("policy.layers", "512"), ("policy.width", "65536"), ("policy.mlp_width", "262144")]
    message = refusal(config_io.load, None, huge)
    assert "billion parameters" in message and "lower `policy.layers`" in message
    config_io.load(None, [*huge, ("mesh.fsdp", "8192")])  # that many devices share it


@pytest.mark.parametrize(
    ("name", "value", "example"),
    [
        ("simulator.onset", "abc", "[1, 1, 1]"),
        ("simulator.onset", "{1: 1}", "[1, 1, 1]"),
        ("data.curriculum", "easy", "[easy, hard]"),
        ("data.curriculum", "", "[easy, hard]"),
    ],
)
def test_a_list_is_asked_for_where_one_belongs(name, value, example):
    with pytest.raises(ConfigError, match=f"`{name}` in .* takes a list, e.g. {re.escape(example)}"):
        config_io.load(None, [(name, value)])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("simulator.onset", "[1, 2]", "give three weights, of immediate, delayed and ramp"),
        ("simulator.onset", "[0, 0, 0]", "give three weights up to"),
        ("simulator.onset", "[1, -1, 1]", "give three weights up to"),
        ("data.curriculum", "[easy, nonsense]", "`nonsense`: choose from easy, paper, hard"),
        ("simulator.difficulty", "brutal", "choose one of easy, paper, hard"),
    ],
)
def test_difficulty_is_checked(name, value, message):
    with pytest.raises(ConfigError, match=message):
        config_io.load(None, [(name, value)])
