"""Packing, and the policy's results on packed rows."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import BatchConfig, ConfigError, MeshConfig, OptimizerConfig, PolicyConfig
from trace_jax.learner import sharding
from trace_jax.learner.aggregation import AGGREGATIONS, aggregate
from trace_jax.learner.objectives import sft_objective
from trace_jax.learner.packing import (
    Sequence,
    bucket_rows,
    empty_batch,
    layout,
    pack,
    pack_buckets,
    plan,
    unpack,
    unpack_buckets,
    validate,
)
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


def positions_of(lengths, config, ways=1):
    return sum(rows * length for rows, length in plan(lengths, config, ways).shapes)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 96), max_size=40),
    st.sets(st.sampled_from([16, 24, 32, 48, 50, 64, 95]), max_size=4),
    st.integers(1, 5),
    st.sampled_from([1, 2, 4]),
)
def test_buckets_hold_every_token_once(lengths, buckets, rows, ways):
    config = BatchConfig(96, rows * ways, tuple(sorted(buckets)))
    rows_of = bucket_rows(config, ways)
    assert list(rows_of) == [96, *sorted(buckets, reverse=True)] and rows_of[96] == config.rows
    assert all(r % ways == 0 and r * n <= 96 * config.rows < (r + ways) * n for n, r in rows_of.items())
    sequences = [Sequence(np.arange(n) + 100 * i, np.arange(n) > 0, weight=i + 1.0) for i, n in enumerate(lengths)]
    batches = pack_buckets(sequences, config, ways=ways)
    assert batches and all(rows_of[b.ids.shape[1]] == len(b.ids) for b in batches)
    for name, expected in [("ids", [s.ids for s in sequences]), ("positions", [np.arange(n) for n in lengths])]:
        got = unpack_buckets([getattr(b, name) for b in batches], lengths, config, ways)
        assert all(np.array_equal(g, e) for g, e in zip(got, expected, strict=True))
    assert sum((b.segments > 0).sum() for b in batches) == sum(lengths)
    assert sum(b.loss_mask.sum() for b in batches) == sum(n - 1 for n in lengths)
    assert sum(b.weights.sum() for b in batches) == sum(n * (i + 1) for i, n in enumerate(lengths))
    for row in (row for b in batches for row in b.segments):
        used = row[row > 0]
        assert np.array_equal(np.sort(used), used) and set(used) == set(range(1, 1 + used.max(initial=0)))
    assert not lengths or all((b.segments > 0).any() for b in batches)  # none of padding alone
    # never more work than with one length, and without buckets the very same rows
    single = BatchConfig(96, config.rows)
    assert sum(b.ids.size for b in batches) == positions_of(lengths, config, ways) <= positions_of(lengths, single)
    if not buckets:
        for got, expected in zip(batches, pack(sequences, 96, config.rows), strict=True):
            assert all(
                np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
            )
        places = [(b * config.rows + row, start) for b, row, start in plan(lengths, config, ways).places]
        assert places == layout(lengths, 96)


def nano_lengths(count):
    """Lengths of trajectories of a nano run (12,800 of them) at evenly spaced quantiles: 107 tokens in the mean."""
    at = (np.arange(count) + 0.5) / count
    return np.interp(at, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1], [23, 57, 99, 109, 115, 134, 147, 224]).astype(int)


def test_buckets_save_padding_on_real_lengths():
    """Of the 256 trajectories of a nano step: rows of 224 beside those of 256 (most hold two trajectories either way)
    halve the padding, and shorter ones shorten rows."""
    lengths = np.random.default_rng(0).permutation(nano_lengths(256)).tolist()

    def padding(*buckets):
        return 1 - sum(lengths) / positions_of(lengths, BatchConfig(256, 8, buckets))

    assert padding() > 0.13 and padding(224) < 0.07 and padding(112, 224) <= padding(224)
    assert padding() >= padding(128) and padding() > padding(192) >= padding(128, 192)
    assert (16, 128) in plan(lengths, BatchConfig(256, 8, (128,))).shapes
    assert plan(lengths, BatchConfig(256, 8, (224,))) == plan(lengths, BatchConfig(256, 8, (224,)))


def test_nearly_empty_micro_batches_are_avoided():
    """One short sequence rides in a long row that is computed anyway, rather than in a micro-batch of its own."""
    config = BatchConfig(96, 2, (16, 32))
    assert plan([90, 10], config).shapes == [(2, 96)]
    assert plan([90, 90, 10], config).shapes == [(2, 96), (12, 16)]
    assert plan([90, 90, 10, 30], config).shapes == [(2, 96), (6, 32)]
    assert plan([10], config).shapes == [(12, 16)]
    assert plan([], config).shapes == [(2, 96)]
    # 3 rows of 50 are less than another 12 of 16
    # best fit fills two rows to the last token, where filling by the longest that fits needs a third
    assert plan([10, 11, 24, 31, 28, 44, 24, 20], BatchConfig(96, 1, (16,))).shapes == [(1, 96), (1, 96)]
    # 3 rows of 50 are less than another 12 of 16
    assert plan([16] * 13, BatchConfig(96, 2, (16, 50))).shapes == [(3, 50), (12, 16)]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_sums_and_gradients_do_not_depend_on_buckets(aggregation):
    """Case 5 of trainer over micro-batches of several shapes: a loss that is linear in a table of 12 ids has the sums,
    denominators and gradients of a sum over the sequences one by one."""
    rng = np.random.default_rng(5)
    sequences = [
        Sequence(rng.integers(0, 12, n), (rng.random(n) < 0.6) & (np.arange(n) > 0), weight=float(rng.integers(1, 4)))
        for n in rng.integers(2, 40, 14)
    ]
    table = rng.normal(size=12).astype(np.float32)
    gradient, total, denominator = np.zeros(12), 0.0, 0.0
    for s in sequences:
        count = int(s.loss_mask.sum())
        share = {"seq_mean_token_mean": 1 / max(count, 1), "seq_sum_constant": 1 / 7}.get(aggregation, 1.0)
        gradient += s.weight * share * np.bincount(s.ids[s.loss_mask], minlength=12)
        total += s.weight * share * table[s.ids[s.loss_mask]].sum()
        denominator += s.weight * (count if aggregation == "token_mean" else count > 0)

    def loss(table, batches):
        sums = [aggregate(table[b.ids], b, aggregation, 7.0) for b in batches]
        return sum(s for s, _ in sums), sum(d for _, d in sums)

    for config in (BatchConfig(48, 2, (16, 32)), BatchConfig(48, 4)):
        batches = pack_buckets(sequences, config)
        assert len({b.ids.shape for b in batches}) == (2 if config.buckets else 1)
        (got, weight), slope = jax.value_and_grad(loss, has_aux=True)(table, batches)
        assert (float(got), float(weight)) == pytest.approx((total, denominator), rel=1e-5)
        np.testing.assert_allclose(slope, gradient, rtol=1e-5)


@pytest.mark.parametrize(
    ("buckets", "ways", "match"),
    [
        ((32, 16), 1, "ascend"),
        ((16, 16, 32), 1, r"ascend and name no length twice: \[16, 32\]"),
        ((8, 32), 1, "leave out those below 16"),
        ((32, 64, 96), 1, "leave out 64, 96"),
        ((32,), 4, "`x.rows` 6 .* multiple of 4"),
        ((), 5, "multiple of 5"),
    ],
)
def test_bad_buckets_are_refused(buckets, ways, match):
    config = BatchConfig(64, 6, buckets)
    with pytest.raises(ConfigError, match=match):
        validate(config, "x", ways)
    with pytest.raises(ConfigError):
        pack_buckets([], config, ways=ways)
    validate(BatchConfig(64, 6, (16, 63)), "x", 3)


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
        return jax.jit(jax.grad(lambda p: (lambda r: r[0] / r[1])(objective(*logprob_fn(p, batch), batch))))(params)

    one, other = grads([s], 16), grads([s, silent], 40)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * float(np.abs(a).max()))


def test_policy_does_not_depend_on_buckets(learner_and_params):
    """Case 3 of trainer: log-probs of every sequence are those of rows of one length."""
    learner, params, graphdef = learner_and_params
    sequences = [sequence(i, 3, n - 3) for i, n in enumerate([38, 14, 9, 30, 12, 25])]
    lengths = [len(s) for s in sequences]
    config, single = BatchConfig(40, 1, (16, 32)), BatchConfig(40, 2)
    batches = pack_buckets(sequences, config)
    assert len({b.ids.shape for b in batches}) == 2
    scores = unpack_buckets(learner.logprobs(params, batches), lengths, config)
    expected = unpack_buckets(learner.logprobs(params, pack_buckets(sequences, single)), lengths, single)
    for got, one in zip(scores, expected, strict=True):
        np.testing.assert_allclose(got, one, atol=1e-5)
