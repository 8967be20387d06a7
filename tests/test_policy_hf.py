"""Hugging Face checkpoints: round trip, golden values of `transformers`, damaged input."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from trace_jax.config import ConfigError, PolicyConfig, TokenizerConfig
from trace_jax.policy import hf, hf_files, hf_write
from trace_jax.policy.chat import CONTROL, NanoChat
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.policy.transformer import Transformer

GOLDEN = Path(__file__).parent / "parity" / "golden"
CFG = PolicyConfig(layers=2, width=32, heads=4, kv_heads=2, head_dim=16, mlp_width=48, rope_theta=5e5, norm_eps=1e-5)


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceTokenizer:
    return SentencePieceTokenizer.train(["SELECT a FROM b", "yes"] * 9, TokenizerConfig(vocab_size=300), CONTROL)


def logits(model: Transformer) -> np.ndarray:
    ids = np.arange(40).reshape(2, 20) % model.vocab_size
    return np.asarray(model.logits(model(ids, np.tile(np.arange(20), (2, 1)), np.ones_like(ids))))


@pytest.fixture(scope="module")
def exported(tokenizer, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("export") / "nested" / "checkpoint"
    model = Transformer(CFG, tokenizer.vocab_size, rngs=nnx.Rngs(0))
    hf.export(directory, model, NanoChat(tokenizer))
    return directory


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_gives_identical_logits(tokenizer, tmp_path, qk_norm, tied):
    cfg = dataclasses.replace(CFG, qk_norm=qk_norm, tie_embeddings=tied)
    model = Transformer(cfg, tokenizer.vocab_size, rngs=nnx.Rngs(0))
    hf.export(tmp_path, model, NanoChat(tokenizer))
    loaded, loaded_tokenizer = hf.load(tmp_path)
    assert np.array_equal(logits(loaded), logits(model))
    assert (
        loaded.cfg == dataclasses.replace(cfg, vocab_size=tokenizer.vocab_size)
        and loaded_tokenizer.hash == tokenizer.hash
    )


@pytest.mark.parametrize("name", ["qwen3", "llama", "llama_tied"])
def test_logits_of_transformers(name, tmp_path):
    """Golden values written by tests/parity/write_golden.py; the versions it ran with are in the file."""
    golden = np.load(GOLDEN / f"{name}.npz")
    (tmp_path / "config.json").write_bytes(golden["config"].tobytes())
    (tmp_path / "model.safetensors").write_bytes(golden["weights"].tobytes())
    model = hf.load_model(tmp_path)
    ids = golden["ids"]
    positions = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
    got = model.logits(model(ids, positions, np.ones_like(ids)))
    np.testing.assert_allclose(got, golden["logits"], atol=2e-5)


def test_config_json_accepts_rope_at_either_place(exported):
    settings = json.loads((exported / "config.json").read_text())
    top = {k: v for k, v in settings.items() if k != "rope_parameters"}
    nested = {k: v for k, v in settings.items() if k != "rope_theta"}
    assert hf.policy_config(top) == hf.policy_config(nested) == hf.policy_config(settings)
    assert hf.policy_config(top).rope_theta == 5e5


def edit(directory: Path, **changes) -> None:
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | changes))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "config.json").write_text("{"), "not JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "vocab_size"),
        (lambda d: edit(d, vocab_size=None), "vocab_size"),
        (lambda d: edit(d, model_type="gpt2"), "gpt2"),
        (lambda d: edit(d, attention_bias=True), "attention_bias"),
        (lambda d: edit(d, rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn' in rope_parameters"),
        (lambda d: edit(d, intermediate_size=64), "on disk"),
        (lambda d: edit(d, num_hidden_layers=3), "layers.2"),
        (lambda d: cut(d / "model.safetensors"), "damaged"),
        (lambda d: (d / "model.safetensors").unlink(), "has no \\*.safetensors: copy"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "save it again as safetensors"),
        (lambda d: (d / "config.json").write_text("[" * 100_000), "nested too deeply"),
        (lambda d: (d / "tokenizer.model").unlink(), "tokenizer.model"),
    ],
)
def test_damaged_checkpoints_are_one_clear_line(exported, tmp_path, damage, word):
    directory = tmp_path / "copy"
    shutil.copytree(exported, directory)
    damage(directory)
    with pytest.raises(ConfigError, match=word) as caught:
        hf.load(directory)
    assert "\n" not in str(caught.value)


def test_export_to_an_impossible_place(tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    model = Transformer(CFG, tokenizer.vocab_size, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="cannot write"):
        hf.export(tmp_path / "file", model, NanoChat(tokenizer))


def test_files_have_the_modes_that_the_umask_gives(exported):
    plain = exported.parent / "plain"
    plain.write_text("")
    assert {p.stat().st_mode for p in exported.iterdir()} == {plain.stat().st_mode}


@pytest.mark.parametrize("fails", ["write", "replace"])
def test_an_export_that_is_cut_off_leaves_no_mix(exported, tokenizer, tmp_path, monkeypatch, fails):
    directory = tmp_path / "copy"
    shutil.copytree(exported, directory)
    before = {p.name: p.read_bytes() for p in directory.iterdir()}

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(hf_files if fails == "write" else hf_write.os, fails, interrupted)
    model = Transformer(dataclasses.replace(CFG, layers=1), tokenizer.vocab_size, rngs=nnx.Rngs(1))
    with pytest.raises(KeyboardInterrupt):
        hf.export(directory, model, NanoChat(tokenizer))
    assert not (directory / hf.PARTIAL).exists()
    if fails == "write":
        assert {p.name: p.read_bytes() for p in directory.iterdir()} == before
    else:  # between two renames: nothing that loads
        with pytest.raises(ConfigError, match="config.json"):
            hf.load_model(directory)
    monkeypatch.undo()
    hf.export(directory, model, NanoChat(tokenizer))
    assert hf.load_model(directory).cfg.layers == 1 and not (directory / hf.PARTIAL).exists()
