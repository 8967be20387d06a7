"""`trace-jax import`: runs that begin with an open checkpoint, whole or not at all; what is refused; the way out."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers_chat import chat_of
from recipes_helpers import compile_cache, records

from trace_jax import cli, config_io
from trace_jax.config import PolicyConfig, TokenizerConfig
from trace_jax.config_rules_policy import parameters
from trace_jax.policy import hf, hf_read
from trace_jax.policy.chat import CONTROL, NanoChat
from trace_jax.policy.hf_files import SafetensorFiles
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.policy.transformer import Transformer

__all__ = ["compile_cache"]  # fixture
CHAT = chat_of("qwen3")
CFG = PolicyConfig(
    vocab_size=CHAT.tokenizer.vocab_size + 3,  # rows that no token has
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp_width=48,
    rope_theta=1e6,
    tie_embeddings=False,
    max_length=4096,
)
RUN = """
environment: {name: search}
search: {documents: 16}
data: {train: 8, validation: 4, test: 4}
rollout: {context: 1024, max_turns: 2, max_turn_tokens: 64, slots: 4}
sft:
  trajectories: 16
  epochs: 1
  batch: 2
  teacher_workers: 1
  microbatch: {row_length: 1024, rows: 1}
grpo:
  steps: 1
  prompts: 2
  group: 2
  validation_episodes: 0
  microbatch: {row_length: 1024, rows: 1}
"""


def drawn(cfg: PolicyConfig, vocab_size: int, **changes) -> Transformer:
    """A policy of random numbers, which NumPy draws: nothing is compiled."""
    model = nnx.eval_shape(lambda: Transformer(cfg, vocab_size, rngs=nnx.Rngs(0)))
    state, rng = nnx.state(model, nnx.Param), np.random.default_rng(0)
    shapes = {name: value.shape for name, value in nnx.to_pure_dict(state).items()}
    values = {n: 1 + 0.1 * rng.normal(size=s) if "norm" in n else 0.2 * rng.normal(size=s) for n, s in shapes.items()}
    nnx.replace_by_pure_dict(state, {n: jnp.asarray(v, jnp.float32) for n, v in (values | changes).items()})
    return nnx.merge(nnx.graphdef(model), state)


def talkative() -> Transformer:
    """A random policy that ends its turns: all hidden states share a direction, in which the stop token scores high."""
    rng = np.random.default_rng(1)
    embedding = 1 + 0.02 * rng.normal(size=(CFG.vocab_size, CFG.width))
    head = 0.02 * rng.normal(size=(CFG.width, CFG.vocab_size))
    head[:, CHAT.stop_id] = 5.0 / CFG.width
    quiet = {n: 0.02 * rng.normal(size=(CFG.layers, w, CFG.width)) for n, w in (("output", 64), ("down", 48))}
    return drawn(CFG, CFG.vocab_size, embedding=embedding, head=head, **quiet)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint in bfloat16 and in two files, with settings that a run cannot make up."""
    directory = tmp_path_factory.mktemp("source") / "Tiny-1.0"
    origin = hf.Origin(dtype="BF16", tokens={"bos_token_id": 3, "eos_token_id": [CHAT.stop_id, 1]})
    generation = json.dumps({"temperature": 0.6, "top_k": 20}).encode()
    hf.export(directory, talkative(), CHAT, origin=origin, shard_bytes=60_000, generation=generation)
    assert (directory / hf.INDEX).exists()
    return directory


def run_file(folder, text: str = RUN):
    (folder / "run.yaml").write_text(text)
    return folder / "run.yaml"


def ran(capsys, *words) -> dict:
    """What a command printed as JSON."""
    capsys.readouterr()
    assert cli.main([*map(str, words), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def refused(capsys, *words) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    assert cli.main([*map(str, words)]) == 2
    lines = capsys.readouterr().err.splitlines()
    found = [line for line in lines if line.startswith("trace-jax:")]
    assert len(found) == 1 and not any("Traceback" in line for line in lines)
    return found[0]


def test_a_run_is_made_and_exported_as_it_came(source, tmp_path, capsys):
    run = tmp_path / "run"
    told = ran(capsys, "import", "--from", source, "--run-dir", run, "--policy.dtype", "bfloat16", "--seed", "7")
    assert told["parameters"] == parameters(CFG, CFG.vocab_size) and told["tensors"] == 3 + 11 * 2
    config = config_io.load(run / "config.yaml")
    fixed = dataclasses.replace(CFG, dtype="bfloat16", max_length=config.rollout.context)
    assert config.policy == fixed and config.seed == 7 and config.name == "Tiny-1.0"
    assert "already holds a run" in refused(capsys, "import", "--from", source, "--run-dir", run)

    out = ran(capsys, "export", "--run-dir", run, "--shard-size", "60KB")
    assert out == {"stage": "base", "path": str(run / "export")}
    for path in source.iterdir():  # tokenizer, template, settings, index and weights
        assert path.read_bytes() == (run / "export" / path.name).read_bytes(), path.name
    ran(capsys, "export", "--run-dir", run, "--dtype", "float32", "--out", tmp_path / "wide")
    assert not list((tmp_path / "wide").glob("model-*"))
    entries = SafetensorFiles(tmp_path / "wide").entries
    assert {e.dtype for e in entries.values()} == {"F32"} and set(entries) == set(SafetensorFiles(source).entries)
    assert "no adapters" in refused(capsys, "export", "--run-dir", run, "--format", "peft")
    assert "--shard-size" in refused(capsys, "export", "--run-dir", run, "--shard-size", "0")


def test_parameters_in_bfloat16_for_adapters(source, tmp_path, capsys):
    words = ("--lora.rank", 2, "--policy.param_dtype", "bfloat16")
    ran(capsys, "import", "--from", source, "--run-dir", tmp_path / "run", *words)
    ran(capsys, "export", "--run-dir", tmp_path / "run", "--shard-size", "60KB")
    for path in source.glob("model-*"):
        assert path.read_bytes() == (tmp_path / "run" / "export" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy.layers", 3], "`policy.layers` is 3, but the checkpoint"),
        (["--policy.rope_theta", 1e4], "`policy.rope_theta` is 10000.0, but the checkpoint"),
        (["--policy.tie_embeddings", "true"], "`policy.tie_embeddings` is True, but"),
        (["--policy.mixers", "[delta]"], "`policy.mixers` is ['delta'], but"),
        (["--policy.max_length", 5000], "`policy.max_length` is 5000, but the checkpoint"),
        (["--policy.max_length", 256], "`rollout.context` (512) exceeds `policy.max_length` (256)"),
        (["--rollout.context", 8192], "`rollout.context` (8192) exceeds `policy.max_length` (4096)"),
        (["--policy.param_dtype", "bfloat16"], "`policy.param_dtype` bfloat16"),
        (["--lora.rank", 2, "--lora.targets", "[expert_up]"], "`lora.targets` has `expert_up`"),
        (["--mesh.tensor", 64], "mesh"),
        (["--config", "nowhere.yaml"], "no such config file"),
        (["--policy.layrs", 3], "did you mean --policy.layers"),
    ],
)
def test_what_disagrees_with_the_checkpoint_is_refused(words, says, source, tmp_path, capsys):
    assert says in refused(capsys, "import", "--from", source, "--run-dir", tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


def test_what_agrees_or_is_the_tokenizers_is_taken(source, tmp_path, capsys):
    same = ["--policy.layers", 2, "--policy.vocab_size", 0, "--policy.mixers", "[attention, attention]"]
    ran(capsys, "import", "--from", source, "--run-dir", tmp_path / "run", *same, "--name", "mine")
    config = config_io.load(tmp_path / "run" / "config.yaml")
    assert config.policy.vocab_size == CFG.vocab_size and config.name == "mine"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer"),
        (lambda d: (d / "chat_template.jinja").write_text("{{"), "template"),
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "generation_config.json").write_text("["), "generation_config.json"),
        (lambda d: next(d.glob("model-00002*")).unlink(), "model-00002"),
        (lambda d: next(d.glob("model-00002*")).write_bytes(b"short"), "damaged"),
    ],
)
def test_damaged_checkpoints_leave_nothing(damage, says, source, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    damage(copy)
    assert says in refused(capsys, "import", "--from", copy, "--run-dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert "no such path" in refused(capsys, "import", "--from", tmp_path / "x", "--run-dir", tmp_path / "run")


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path, capsys):
    cfg = dataclasses.replace(CFG, vocab_size=0)
    hf.export(tmp_path / "m", drawn(cfg, 64), CHAT)
    assert "64: use the files of one model" in refused(
        capsys, "import", "--from", tmp_path / "m", "--run-dir", tmp_path / "run"
    )


@pytest.mark.parametrize("there", [False, True])
def test_ctrl_c_leaves_nothing(there, source, tmp_path, capsys, monkeypatch):
    """A signal in the middle of the weights: status 130, the directory as it was, the same command begins again."""
    run, plain = tmp_path / "run", hf_read.read
    if there:
        run.mkdir()
        (run / "notes.txt").write_text("mine")

    def stopped(*args):
        *rest, progress = args

        def told(done, total):
            if done == 5:
                signal.raise_signal(signal.SIGINT)
            progress(done, total)

        return plain(*rest, told)

    words = ["import", "--from", str(source), "--run-dir", str(run)]
    with monkeypatch.context() as patch:
        patch.setattr(hf_read, "read", stopped)
        assert cli.main(words) == 130
    assert "interrupted; start again with: trace-jax import" in capsys.readouterr().err
    assert [p.name for p in run.iterdir()] == ["notes.txt"] if there else not run.exists()
    assert cli.main(words) == 0 and (run / "config.yaml").exists()


def test_no_extra_is_loaded_by_the_command_line():
    """The package `gguf` and `tokenizers` only when a checkpoint needs them."""
    code = "import sys, trace_jax.recipes.import_model; print([m for m in ('gguf', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_grpo_begins_with_the_imported_policy(source, tmp_path, capsys, compile_cache):
    """Without SFT: after one step of Adam every weight is near the imported one, and goes out in its type."""
    run = tmp_path / "run"
    ran(capsys, "import", "--from", source, "--run-dir", run, "--config", run_file(tmp_path))
    told = ran(capsys, "grpo", "--run-dir", run, "--resume", "--grpo.optimizer.learning_rate", 1e-3)
    assert told["stage"] == "grpo" and [r["stage"] for r in records(run)] == ["grpo"]
    assert ran(capsys, "export", "--run-dir", run)["stage"] == "grpo"
    before, after = (SafetensorFiles(d) for d in (source, run / "export"))
    shapes = [{n: (e.dtype, e.shape) for n, e in f.entries.items()} for f in (before, after)]
    assert shapes[0] == shapes[1]
    for name in before.entries:
        old, new = (f.array(name).astype(np.float32) for f in (before, after))
        assert np.abs(new - old).max() < 2e-3 + 2**-7 * np.abs(old).max(), name


@pytest.mark.slow
def test_adapters_are_trained_by_sft_and_grpo_and_exported_both_ways(source, tmp_path, capsys, compile_cache):
    """The merged weights are the imported ones plus alpha / r B A of the exported adapters."""
    run = tmp_path / "run"
    words = ("--lora.rank", 2, "--lora.alpha", 6, "--lora.targets", "[query, down]")
    ran(capsys, "import", "--from", source, "--run-dir", run, "--config", run_file(tmp_path), *words)
    for stage in ("sft", "grpo"):
        ran(capsys, stage, "--run-dir", run, "--resume")
        ran(capsys, "export", "--run-dir", run, "--dtype", "float32")
        ran(capsys, "export", "--run-dir", run, "--format", "peft")
        base, whole, pairs = (SafetensorFiles(d) for d in (source, run / "export", run / "adapter"))
        assert len(pairs.entries) == 2 * 2 * CFG.layers
        for name in base.entries:
            tensor = base.array(name).astype(np.float64)
            a, b = (f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight" for x in "AB")
            if a in pairs.entries:
                assert np.abs(pairs.array(b)).max() > 0
                tensor = tensor + 3.0 * pairs.array(b) @ pairs.array(a)
            np.testing.assert_allclose(whole.array(name), tensor, atol=1e-5)
    assert {r["stage"] for r in records(run)} >= {"sft", "grpo"}


def test_a_policy_from_scratch_comes_back_with_its_own_tokenizer(tmp_path, capsys):
    tokenizer = SentencePieceTokenizer.train(["SELECT a FROM b", "yes"] * 9, TokenizerConfig(vocab_size=300), CONTROL)
    cfg = dataclasses.replace(CFG, vocab_size=0)
    hf.export(tmp_path / "m", drawn(cfg, tokenizer.vocab_size), NanoChat(tokenizer))
    ran(capsys, "import", "--from", tmp_path / "m", "--run-dir", tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.model").exists() and not (tmp_path / "run" / "tokenizer.json").exists()
    ran(capsys, "export", "--run-dir", tmp_path / "run")
    for name in ("model.safetensors", "tokenizer.model", "tokenizer.json", "config.json", "generation_config.json"):
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / "run" / "export" / name).read_bytes(), name
