"""Checkpoints both ways against `transformers` itself, see `helpers_models.reference` for where it may be installed.
The plain run compares with golden values, see tests/test_policy_hf_models.py."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from helpers_chat import chat_of
from helpers_models import agree, checkpoint, golden, logits_at_once, reference

from trace_jax.config import PolicyConfig
from trace_jax.policy import hf
from trace_jax.policy.hf_write import params_of
from trace_jax.policy.transformer import Transformer

pytestmark = pytest.mark.parity
RANDOM = 32
DELTA = {"delta_key_heads": 2, "delta_value_heads": 4, "delta_key_dim": 8, "delta_value_dim": 6}
GATED = {"attention_gate": True, "norm_offset": True, "rotary_fraction": 0.5, **DELTA}
EXPERTS = {"experts": 5, "experts_per_token": 2, "expert_width": 12, "mlp_width": 0}
POLICIES = {
    "llama": {"qk_norm": False, "tie_embeddings": True},
    "qwen3": {"tie_embeddings": False, "kv_heads": 1},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": False},
    "qwen3_5": {**GATED, "mixers": ("delta", "attention"), "layers": 3},
    "qwen3_5_moe": {**GATED, **EXPERTS, "shared_expert_width": 10, "mixers": ("attention", "delta"), "kv_heads": 4},
}


@pytest.mark.slow
def test_random_models_have_the_logits_and_gradients_of_transformers(tmp_path):
    reference("random", tmp_path, RANDOM)
    for seed in range(RANDOM):
        stored = np.load(tmp_path / f"{seed:03d}.npz")
        try:
            agree(stored, checkpoint(stored, tmp_path / str(seed)))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        jax.clear_caches()


def test_what_is_exported_opens_without_a_missing_or_unexpected_key(tmp_path):
    """Policies from scratch in float32 and in several files, and an imported one trained elsewhere, in bfloat16."""
    chat, wanted = chat_of("qwen3"), []
    ids = np.arange(2 * 21).reshape(2, 21)
    for name, changes in POLICIES.items():
        sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 12, "mlp_width": 40}
        cfg = PolicyConfig(**{**sizes, **changes}, vocab_size=432, max_length=64)
        model = Transformer(cfg, 432, rngs=nnx.Rngs(3))
        noise = iter(jax.random.split(jax.random.key(0), 64))
        state = nnx.state(model, nnx.Param)
        for param in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable)):
            param.set_value(param.get_value() + 0.1 * jax.random.normal(next(noise), param.get_value().shape))
        nnx.update(model, state)
        hf.export(tmp_path / name, model, chat, shard_bytes=60_000)
        assert len(list((tmp_path / name).glob("model-*.safetensors"))) > 1
        wanted.append((name, logits_at_once(model, ids)))
    imported = hf.load_model(checkpoint(golden("qwen3_5_moe_single"), tmp_path / "m"))
    imported.cfg = dataclasses.replace(imported.cfg, dtype="float32")
    assert imported.vocab_size == 96 and params_of(imported)["expert_up"].dtype == np.float32
    origin = hf.Origin(dtype="BF16", fused=True, tokens={"eos_token_id": 1})
    hf.export(tmp_path / "fused", imported, chat, origin=origin)
    wanted.append(("fused", logits_at_once(imported, ids)))
    reference("open", tmp_path / "out.npz", *(tmp_path / name for name, _ in wanted))
    theirs = np.load(tmp_path / "out.npz")
    for i, (name, ours) in enumerate(wanted):
        np.testing.assert_allclose(ours, theirs[str(i)], atol=2e-4, rtol=1e-4, err_msg=name)
