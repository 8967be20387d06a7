"""`bench learner`: every key at a tiny size, the forms of a batch, the peer's protocol with a fake peer and, where
there is a Python with torch, that the real one does the same update."""

import dataclasses
import importlib.util
import json
import os
import sys
import textwrap
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from trace_jax import cli
from trace_jax.bench import learner, learner_batches, learner_compare, learner_memory, learner_peer, rollout_peer
from trace_jax.bench.learner_batches import Shape
from trace_jax.bench.learner_compare import Size
from trace_jax.bench.rollout_peer import Peer
from trace_jax.config import PolicyConfig
from trace_jax.learner.step import transformer_logprobs
from trace_jax.policy.transformer import Transformer

POLICY = PolicyConfig(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16, max_length=128)
SHAPE = Shape(rows=2, row_length=64, packed_rows=2, packed_length=64, microbatches=2)
SETTINGS = (
    "policy.layers 1, policy.width 16, policy.heads 2, policy.kv_heads 1, policy.head_dim 8, policy.mlp_width 16, "
    "policy.max_length 128, tokenizer.vocab_size 300, rollout.context 128, rollout.max_turn_tokens 8, "
    "grpo.microbatch.row_length 128, grpo.microbatch.rows 2, sft.microbatch.row_length 128"
)
TINY = [word for setting in SETTINGS.split(", ") for word in f"--{setting}".split()]
# An interpreter with torch and transformers.
OTHER = os.environ.get("TRACE_JAX_PEERS")
HERE = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers") and sys.executable

# Takes a hundred seconds for a step on full rows, ten on packed and a thousand on padded ones; twice as many with sdpa,
# half as many when only trained tokens are scored.
FAKE = """
    import json, math, pathlib, struct, sys

    def answer(value):
        print(json.dumps(value), flush=True)

    answer({"versions": {"fake": "1"}})
    steps, forms, empty = 0, {}, 0
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "load":
            raw = (pathlib.Path(request["directory"]) / "model.safetensors").read_bytes()
            size = struct.unpack("<Q", raw[:8])[0]
            shapes = [entry["shape"] for name, entry in json.loads(raw[8 : 8 + size]).items() if name[0] != "_"]
            answer({"parameters": sum(map(math.prod, shapes))})
        elif request["op"] == "batches":
            assert request["packed"] == (request["form"] == "packed")
            assert all(any(row) for batch in request["batches"] for row in batch["segments"]), "a row of padding"
            forms[request["form"]] = request["batches"]
            answer({})
        elif request["op"] == "logprobs":
            answer({"logprobs": [[[0.0] * len(r) for r in b["ids"]] for b in forms[request["form"]]]})
        elif request["op"] == "step":
            seconds = {"full": 100.0, "packed": 10.0, "padded": 1000.0}[request["form"]]
            seconds *= 2 if request["attention"] == "sdpa" else 1
            seconds *= 0.5 if request["selective"] else 1
            answer({"seconds": seconds, "loss": 0.0, "grad_norm": 1.0, "threads": 7})
        elif request["op"] == "compare":
            assert all(pathlib.Path(request[key]).exists() for key in ("parameters", "moments"))
            answer({"parameter": 0.0, "gradient": 0.5})
        else:
            answer({})
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE))
    monkeypatch.setattr(learner_peer, "SCRIPT", script)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(learner_compare, "SIZES", {"nano": Size(POLICY, 50, SHAPE, most_rounds=2)})
    monkeypatch.setattr(learner_compare, "SETTLE_SECONDS", 0.0)


def bench(capsys, *words):
    assert cli.main(["bench", "learner", "--json", *TINY, *words]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    return json.loads(lines[-1]), "\n".join(lines[:-1]), captured.err


def test_every_figure_is_there_and_is_that_of_its_seconds(monkeypatch, capsys, small, fake):
    monkeypatch.setattr(learner_compare, "MOST_DIFFERENT", np.inf)  # the fake's log-probs are zero
    # Test_bench_kinds.py looks at the shapes of the configuration, a test below at memory.
    empty = {section: {} for section in ("sizes", "floor", "measured", "share")}
    monkeypatch.setattr(learner, "_configured", lambda config, repeats: empty)
    monkeypatch.setattr(learner_memory, "peak_bytes", lambda policy, vocab_size: {"chunked": 10, "full": 40})
    result, shown, progress = bench(capsys, "--repeats", "3", "--peers", sys.executable)
    headline = ("tokens_per_s", "vs_torch", "matmul_share", "packing_gain", "peak_memory_ratio")
    (row,), details = result["table"], result["details"]["nano"]
    assert all(result[key] == row[key] > 0 for key in (*headline, "bucket_gain")) and row["size"] == "nano"
    assert result["details"]["peer_versions"] == {"fake": "1"}

    seconds = details["seconds"]
    assert details["peer_attention"] == "eager" and details["peer_threads"] == 7
    assert [seconds[f"torch_{form}"]["median"] for form in ("full", "packed", "padded")] == [100.0, 10.0, 1000.0]
    assert details["forms"]["full"] == {"shapes": [[2, 64]], "tokens": 128, "padding": 0.0}
    assert row["tokens_per_s"] == pytest.approx(128 / seconds["full"]["median"])
    assert details["tokens_per_second"]["torch_full"] == pytest.approx(1.28)
    for key, ours, theirs in (
        ("vs_torch", "full", 100.0),
        ("vs_torch_selective", "full", 50.0),
        ("vs_torch_padded", "packed", 1000.0),
        ("vs_torch_packed", "packed", 10.0),
    ):
        lowest, highest = theirs / seconds[ours]["slowest"], theirs / seconds[ours]["fastest"]
        assert lowest * 0.999 <= row[key] <= highest * 1.001
        assert details[key]["lowest"] == pytest.approx(lowest)
    assert 0 < row["matmul_share"] < 5
    assert details["differences"]["gradient"] == 0.5 and details["differences"]["logprobs"] > 1
    assert row["peak_memory_ratio"] == 0.25
    assert "nano: round 2 of 2" in progress and "size nano, tokens_per_s" in shown  # however many were asked for


def test_without_torch_the_comparison_is_null_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(rollout_peer, "PACKAGES", ("no_such_package",))
    python, note = learner_peer.interpreter(None)
    assert python is None and "--peers PYTHON" in note and "vs_torch" in note
    assert learner_peer.interpreter("/some/python") == ("/some/python", None)
    assert learner_compare._against([{"full": 1.0}], "full", "torch_full") is None


@pytest.mark.parametrize(("logprob", "gradient", "what"), [(2e-3, 0.0, "log-probs"), (0.0, 2e-3, "gradient")])
def test_a_peer_that_computes_another_update_is_no_comparison(logprob, gradient, what):
    (batch,) = learner_batches.full(SHAPE, 50, seed=0)
    zeros = np.zeros(batch.ids.shape)
    ours = SimpleNamespace(
        logprobs=lambda batches: [zeros],
        step=lambda batches: (0.0, {"loss": 0.0}),
        save=lambda tree, path: None,
        first_moments=lambda: None,
        state=SimpleNamespace(params=None),
    )
    answers = {"logprobs": {"logprobs": [(zeros + logprob).tolist()]}, "compare": {"gradient": gradient}}
    theirs = SimpleNamespace(ask=lambda op, **_: answers[op], step=lambda *_: {"loss": 0.0})
    forms = dict.fromkeys(learner_compare.PEER_FORMS, [batch])
    with pytest.raises(RuntimeError, match=f"another update: its {what}"):
        learner_compare._differences(ours, theirs, forms)


@pytest.mark.skipif(not (OTHER or HERE), reason="no torch here and no TRACE_JAX_PEERS")
def test_torch_does_the_same_update(small):
    """Log-probs of all forms and the gradient in float32 rounding; parameters within a hundredth of an update."""
    with Peer(OTHER or HERE, learner_peer.SCRIPT) as peer:
        result = learner_compare.compare("nano", 1, peer, lambda part: None)
    differences = result["differences"]
    assert differences["logprobs"] < 1e-4 and differences["loss"] < 1e-5
    assert differences["gradient"] < 1e-4
    assert differences["parameter"] < 0.01 * learner_compare.OPTIMIZER.learning_rate
    assert result["vs_torch"]["median"] > 0 and result["peer_attention"] in learner_compare.ATTENTION


def test_forms_hold_the_same_sequences_in_no_more_positions_than_there_are():
    sequences = learner_batches.real(SHAPE, 50, seed=3)
    wanted = sorted(tuple(s.ids) for s in sequences)
    longest = max(map(len, sequences))
    assert SHAPE.budget == 2 * 64
    for form in (learner_batches.packed, learner_batches.bucketed, learner_batches.padded):
        found, batches = [], form(sequences, SHAPE)
        for batch in batches:
            assert batch.ids.size <= SHAPE.budget
            for ids, positions, segments in zip(batch.ids, batch.positions, batch.segments, strict=True):
                for segment in range(1, segments.max() + 1):
                    at = segments == segment
                    assert list(positions[at]) == list(range(at.sum()))
                    found.append(tuple(ids[at]))
        assert sorted(found) == wanted and learner_batches.tokens(batches) == sum(map(len, wanted))
        of_each = [n for ids in wanted for n in range(1, len(ids) + 1)]
        assert learner_batches.attended(batches) == pytest.approx(np.mean(of_each))
    assert all(b.ids.shape == (batches[0].ids.shape[0], longest) and b.segments.max() == 1 for b in batches)


def test_real_lengths_fill_the_packed_rows():
    """As they are where they fit, shrunk in shorter rows."""
    batches = learner_batches.packed(learner_batches.real(Shape(), 50, seed=0), Shape())
    assert [b.ids.shape for b in batches] == [(8, 256)] * 8 and learner_batches.tokens(batches) > 0.8 * 16384
    assert list(learner_batches.LENGTHS) == sorted(learner_batches.LENGTHS)
    assert np.mean(learner_batches.LENGTHS) == pytest.approx(107, abs=1)
    short = learner_batches.real(dataclasses.replace(SHAPE, packed_length=24), 50, seed=0)
    assert 12 < max(map(len, short)) <= 24


def test_full_logprobs_are_those_of_the_learner():
    """What memory is compared of computes the same numbers."""
    model = Transformer(POLICY, 50, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    sequences = learner_batches.real(dataclasses.replace(SHAPE, packed_length=16), 50, seed=1)
    (batch, *_) = learner_batches.packed(sequences, SHAPE)
    assert batch.segments.max() > 1 and batch.segments.min() == 0
    ours = jax.jit(transformer_logprobs(graphdef))(params, batch)
    full = jax.jit(learner_memory.full_logprobs(graphdef))(params, batch)
    trained = batch.loss_mask
    assert 0 < trained.sum() < trained.size / 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[trained], b[trained], atol=2e-6), ours, full)


def test_chunks_avoid_the_array_of_all_scores(monkeypatch):
    monkeypatch.setattr(learner_memory, "SHAPE", Shape(rows=64, row_length=64))
    memory = learner_memory.peak_bytes(POLICY, 4050)
    assert memory["chunked"] < 4 * 64 * 64 * 4050 < memory["full"]
