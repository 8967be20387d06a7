"""Adapters for PEFT: what its form means is what ours does."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from helpers_models import checkpoint, golden, logits_at_once, reference

from trace_jax.config import ConfigError, LoraConfig
from trace_jax.config_rules_policy import targets
from trace_jax.policy import hf, hf_peft, lora
from trace_jax.policy.hf_write import params_of, planned
from trace_jax.policy.transformer import Transformer

FAMILIES = ("llama", "qwen3_5", "qwen3_5_moe")


def adapted(name, directory, kept=lambda target: True):
    """A golden model, adapters of what PEFT can have (none is zero), and the same model with them merged."""
    model = hf.load_model(checkpoint(golden(name), directory))
    model.cfg = dataclasses.replace(model.cfg, dtype="float32")
    names = tuple(t for t in targets(model.cfg) if not t.startswith("expert_") and kept(t))
    config = LoraConfig(rank=3, alpha=5.0, targets=names)
    pairs = lora.init(model.cfg, config, jax.random.key(0))
    key = iter(jax.random.split(jax.random.key(1), len(pairs)))
    pairs = {n: p._replace(b=0.3 * jax.random.normal(next(key), p.b.shape)) for n, p in pairs.items()}
    merged = lora.merged(params_of(model), pairs, config.alpha / config.rank)
    return model, config, pairs, merged


@pytest.mark.parametrize("name", FAMILIES[1:])
def test_weights_with_the_products_added_are_those_that_are_merged(name, tmp_path):
    """Every module by itself: W + alpha / r B A in NumPy, r and alpha as adapter_config.json gives them."""
    model, config, pairs, merged = adapted(name, tmp_path / "m", kept=lambda t: t != "delta_key")
    hf_peft.export(tmp_path / "a", model.cfg, config, pairs)
    stored = safetensors.numpy.load_file(tmp_path / "a" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    origin = hf.Origin(fused=True)
    base, whole = (
        {n: t.make().astype(np.float64) for n, t in planned(p, model.cfg, model.vocab_size, origin).items()}
        for p in (params_of(model), merged)
    )
    changed = 0
    for key, tensor in base.items():
        module = key.removesuffix(".weight")
        a, b = (stored.get(f"base_model.model.{module}.lora_{x}.weight") for x in "AB")
        if a is not None:
            short = module.split(".", 3)[3]
            assert short in settings["target_modules"]
            rank = settings["rank_pattern"].get(short, settings["r"])
            assert a.shape[0] == b.shape[1] == rank
            tensor = tensor + settings["alpha_pattern"].get(short, settings["lora_alpha"]) / rank * (b @ a)
            changed += 2
        np.testing.assert_allclose(tensor, whole[key], atol=1e-5)
    assert changed == len(stored)


def test_merging_keeps_the_type_unless_it_is_to_be_exact():
    """In bfloat16 most of a small product is lost, in float32 nothing."""
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(1, 6, 5)), jnp.bfloat16)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 1, 6, 2), (1, 1, 2, 5)))
    pairs = {"up": lora.Pair(jnp.asarray(a), jnp.asarray(b * 1e-3))}
    wanted = np.asarray(weight, np.float64) + 2.0 * 1e-3 * a[:, 0].astype(np.float64) @ b[:, 0]
    exact = lora.merged({"up": weight}, pairs, 2.0, exact=True)["up"]
    assert exact.dtype == jnp.float32
    np.testing.assert_allclose(exact, wanted, atol=1e-6)
    rounded = lora.merged({"up": weight}, pairs, 2.0)["up"]
    assert rounded.dtype == jnp.bfloat16 and np.abs(np.asarray(rounded, np.float64) - wanted).max() > 1e-4


def test_what_has_no_form_is_refused(tmp_path):
    model, config, pairs, _ = adapted("qwen3_5_moe", tmp_path / "m")
    bad = dataclasses.replace(config, targets=(*config.targets, "expert_up"))
    with pytest.raises(ConfigError, match="adapters of single experts .expert_up.: use --format hf"):
        hf_peft.export(tmp_path / "a", model.cfg, bad, pairs)
    with pytest.raises(ConfigError, match="no adapters"):
        hf_peft.export(tmp_path / "a", model.cfg, LoraConfig(), {})
    assert not (tmp_path / "a").exists()


@pytest.mark.parity
@pytest.mark.parametrize("name", FAMILIES)
def test_peft_opens_them_and_says_the_same(name, tmp_path):
    model, config, pairs, merged = adapted(name, tmp_path / "m")
    hf_peft.export(tmp_path / "a", model.cfg, config, pairs)
    if name == "qwen3_5_moe":  # as text alone, the form that is exported
        from test_policy_hf_models import rewritten

        (tmp_path / "m" / "config.json").write_text(json.dumps(hf.config_json(model.cfg, model.vocab_size)))
        rewritten(tmp_path / "m", lambda a: {n.replace("model.language_model.", "model."): v for n, v in a.items()})
    reference("adapt", tmp_path / "out.npz", tmp_path / "m", tmp_path / "a")
    state = nnx.state(nnx.eval_shape(lambda: Transformer(model.cfg, model.vocab_size, rngs=nnx.Rngs(0))), nnx.Param)
    nnx.replace_by_pure_dict(state, merged)
    ids = np.arange(2 * 21).reshape(2, 21) % model.vocab_size
    ours = logits_at_once(nnx.merge(nnx.graphdef(model), state), ids)
    np.testing.assert_allclose(ours, np.load(tmp_path / "out.npz")["logits"], atol=2e-4, rtol=1e-4)
