"""Packing, and the policy's results on packed rows."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import ConfigError, MeshConfig, OptimizerConfig, PolicyConfig
from trace_jax.learner import sharding
from trace_jax.learner.objectives import sft_objective
from trace_jax.learner.packing import Sequence, empty_batch, layout, pack, unpack
from trace_jax.learner.step import Learner, transformer_logprobs
from trace_jax.policy.transformer import Transformer, logical_axes

TINY = PolicyConfig(layers=2, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=64, max_length=128)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 32), max_size=40), st.integers(1, 5))
def test_every_token_lands_once(lengths, rows):
    sequences = [Sequence(np.arange(n) + 100 * i, np.arange(n) > 0) for i, n in enumerate(lengths)]
    batches = pack(sequences, 32, rows)
    assert all(b.ids.shape == (rows, 32) for b in batches)
    for name, expected in [("ids", [s.ids for s in sequences]), ("positions", [np.arange(n) for n in lengths])]:
        got = unpack([getattr(b, name) for b in batches], lengths, 32)
        assert all(np.array_equal(g, e) for g, e in zip(got, expected, strict=True))
    assert sum((b.segments > 0).sum() for b in batches) == sum(lengths)
    assert sum(b.loss_mask.sum() for b in batches) == sum(n - 1 for n in lengths)
    for b in batches:
        for row in b.segments:
            used = row[row > 0]
            assert np.array_equal(np.sort(used), used) and set(used) == set(range(1, 1 + used.max(initial=0)))
    # one token more than half a row at most may stay empty in all rows but one
    row_use = np.concatenate([(b.segments > 0).sum(1) for b in batches])
    assert np.sum((row_use > 0) & (row_use <= 16)) <= 1


def test_little_padding_and_determinism():
    lengths = np.random.default_rng(0).integers(60, 190, 256).tolist()
    assert layout(lengths, 512) == layout(lengths, 512)
    rows = 1 + max(r for r, _ in layout(lengths, 512))
    assert rows <= 1.03 * sum(lengths) / 512 + 1


def test_kept_ids_land_with_their_tokens():
    """Sequences of another width, or without kept ids, are filled up with -1; so is padding."""
    rng = np.random.default_rng(0)
    lengths, widths = [5, 9, 3, 7, 4], [3, 1, 2, 0, 3]
    sequences = []
    for n, k in zip(lengths, widths, strict=True):
        ids = rng.integers(0, 50, n)
        kept = np.concatenate([ids[:, None], rng.integers(0, 50, (n, max(k, 1) - 1))], axis=1)
        sequences.append(Sequence(ids, np.arange(n) > 0, kept=kept if k else None))
    batches = pack(sequences, 12, 2, top_k=3)
    assert all(b.kept.shape == (2, 12, 3) and b.kept.dtype == np.int32 for b in batches)
    for s, got in zip(sequences, unpack([b.kept for b in batches], lengths, 12), strict=True):
        expected = np.full((len(s), 3), -1)
        if s.kept is not None:
            expected[:, : s.kept.shape[1]] = s.kept
        assert np.array_equal(got, expected)
    assert all((b.kept[b.segments == 0] == -1).all() for b in batches)
    assert all(b.kept is None for b in pack([sequences[3]], 12, 2))
    assert empty_batch(12, 2, 3).kept.tolist() == [[[-1] * 3] * 12] * 2


def test_bad_kept_ids_are_refused():
    ids, mask = np.array([4, 5, 6]), np.array([False, True, False])
    pack([Sequence(ids, mask, kept=np.array([[-1, -1], [7, 5], [-1, 0]]))], 8, 2, top_k=2)
    for kept, top_k, match in [
        ([[-1, -1], [7, 8], [6, 0]], 2, "not among the ids kept"),
        ([[4, -1], [5, 7]], 2, "kept has 2 entries"),
        ([[-1, -1], [7, 5], [-1, 0]], 0, "top_k is 0"),
    ]:
        with pytest.raises(ValueError, match=match):
            pack([Sequence(ids, mask, kept=np.array(kept))], 8, 2, top_k)


def test_bad_sequences_are_refused():
    with pytest.raises(ConfigError, match="row_length"):
        pack([Sequence(np.arange(9), np.arange(9) > 0)], 8, 2)
    with pytest.raises(ValueError, match="first token"):
        pack([Sequence(np.arange(3), np.ones(3, bool))], 8, 2)
    with pytest.raises(ValueError, match="old_logprobs"):
        pack([Sequence(np.arange(3), np.arange(3) > 0, 0.0, np.zeros(2))], 8, 2)
    with pytest.raises(ValueError, match="empty"):
        pack([Sequence(np.arange(0), np.zeros(0, bool))], 8, 2)
    assert len(pack([], 8, 2)) == 1


@pytest.fixture(scope="module")
def learner_and_params():
    model = Transformer(TINY, 64, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    learner = Learner(
        transformer_logprobs(graphdef), sft_objective(), OptimizerConfig(), 10,
        sharding.make_mesh(MeshConfig(), jax.devices()[:1]), logical_axes(model),
    )  # fmt: skip
    return learner, params, graphdef


def sequence(seed, prompt, response):
    ids = np.random.default_rng(seed).integers(0, 64, prompt + response)
    return Sequence(ids, np.arange(len(ids)) >= prompt)


def test_replay_does_not_depend_on_packing(learner_and_params):
    """Case 3 of trainer with kept ids: alone, and in one row with a sequence that has none and one that has others."""
    learner, params, _ = learner_and_params
    rng = np.random.default_rng(9)

    def kept(s):
        return replace(s, kept=np.concatenate([s.ids[:, None], rng.integers(0, 64, (len(s), 4))], axis=1))

    s, whole, t = kept(sequence(1, 7, 9)), sequence(2, 5, 8), kept(sequence(3, 3, 6))

    def score(sequences):
        return unpack(learner.logprobs(params, pack(sequences, 40, 1, 5)), [len(x) for x in sequences], 40)

    packed = score([s, whole, t])
    for got, one in zip(packed, (s, whole, t), strict=True):
        np.testing.assert_allclose(got, score([one])[0], atol=1e-5)
    np.testing.assert_allclose(
        packed[1], unpack(learner.logprobs(params, pack([whole], 40, 1)), [13], 40)[0], atol=1e-5
    )
    assert np.all(packed[0][1:] > score([replace(s, kept=None)])[0][1:])


def test_logprobs_do_not_depend_on_packing(learner_and_params):
    """Case 3 c, d, e of trainer: alone, right-padded, after and before another sequence."""
    learner, params, graphdef = learner_and_params
    s, t, other = sequence(1, 7, 9), sequence(2, 5, 8), sequence(3, 5, 8)
    long, long_other = sequence(4, 9, 10), sequence(5, 9, 10)

    def score(sequences, length):
        return unpack(learner.logprobs(params, pack(sequences, length, 2)), [len(x) for x in sequences], length)

    (alone,) = score([s], 16)
    (padded,) = score([s], 40)
    before = score([s, t], 40)[0]  # longest first: s starts the row
    after = score([s, long], 40)[0]
    assert layout([16, 19], 40)[0] == (0, 19)
    for got in (padded, before, after):
        np.testing.assert_allclose(got, alone, atol=1e-5)
    assert np.array_equal(before, score([s, other], 40)[0])
    assert np.array_equal(after, score([s, long_other], 40)[0])
    assert alone[0] == 0 and after[0] == 0
    # the values themselves, from the full distribution of the unpacked model
    model = nnx.merge(graphdef, params)
    hidden = model(s.ids[None], np.arange(16)[None], np.ones((1, 16), int))
    logp = jax.nn.log_softmax(model.logits(hidden))[0]
    np.testing.assert_allclose(alone[1:], logp[np.arange(15), s.ids[1:]], atol=1e-5)


def test_gradients_do_not_depend_on_packing(learner_and_params):
    """Case 3 of trainer: gradients of (a) alone and (d) packed agree."""
    learner, params, graphdef = learner_and_params
    s, silent = sequence(1, 7, 9), sequence(4, 19, 0)
    logprob_fn, objective = transformer_logprobs(graphdef), sft_objective()

    def grads(sequences, length):
        (batch,) = pack(sequences, length, 2)
        return jax.grad(lambda p: (lambda r: r[0] / r[1])(objective(*logprob_fn(p, batch), batch)))(params)

    one, other = grads([s], 16), grads([s, silent], 40)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * float(np.abs(a).max()))
