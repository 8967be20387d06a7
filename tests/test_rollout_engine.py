"""The engine against the plain forward pass of the policy."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from trace_jax.config import ConfigError, PolicyConfig, RolloutConfig
from trace_jax.policy.transformer import Transformer, token_logprobs
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.programs import CHUNKS, batch_buckets, length_buckets
from trace_jax.rollout.sampling import Sampling

VOCABULARY, STOP = 48, 3
POLICY = PolicyConfig(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=64, max_length=256)
CONFIG = RolloutConfig(max_turn_tokens=24, context=192, slots=48)


@pytest.fixture(scope="module")
def model():
    return Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, CONFIG, STOP, lanes=1)


_forward = jax.jit(
    lambda params, structure, ids, positions, segments, temperature: token_logprobs(
        nnx.merge(structure, params),
        nnx.merge(structure, params)(ids, positions, segments)[:, :-1],
        ids[:, 1:],
        temperature,
    )[0],
    static_argnums=(1,),
)


def teacher_forced(model, histories, temperature=1.0):
    """Log-probability of every token of each history, from one full forward pass of the trainer's code."""
    structure, params = nnx.split(model)
    ids = np.zeros((len(histories), CONFIG.context), np.int32)
    for row, history in zip(ids, histories, strict=True):
        row[: len(history)] = history
    positions = np.broadcast_to(np.arange(CONFIG.context), ids.shape)
    segments = (positions < np.array([[len(h)] for h in histories])).astype(np.int32)
    out = np.asarray(_forward(params, structure, ids, positions, segments, temperature))
    return [np.concatenate([[0.0], row[: len(h) - 1]]) for row, h in zip(out, histories, strict=True)]


def play(engine, prompts, seeds, turns=3, sampling=None, limits=CONFIG.max_turn_tokens, salt=0):
    """Several turns with observations of different lengths between; histories, sampled positions and log-probs."""
    engine.begin(prompts, np.asarray(seeds, np.uint64), sampling or Sampling(1.0))
    histories = [list(p) for p in prompts]
    sampled = [[] for _ in prompts]
    rows = np.arange(len(prompts))
    for turn in range(turns):
        for row, out in zip(rows, engine.sample_turn(rows, np.full(len(rows), limits)), strict=True):
            sampled[row] += list(zip(range(len(histories[row]), 999), out.logprobs, strict=False))
            histories[row] += out.ids.tolist()
            assert len(out.ids) == len(out.logprobs) and out.stopped == (out.ids[-1] == STOP)
            assert STOP not in out.ids[:-1] and (out.stopped or len(out.ids) == limits)
        # Observations are functions of the row's seed, so that a row lives the same life in any batch.
        observations = [
            np.random.default_rng([salt, int(seeds[r]), turn]).integers(4, VOCABULARY, 1 + int(seeds[r]) % 23)
            for r in rows
        ]
        engine.extend(rows, observations)
        for row, new in zip(rows, observations, strict=True):
            histories[row] += new.tolist()
    return histories, sampled


def prompts_of(n, rng=None, same=4):
    """n prompts of 3 to 27 tokens, each `same` times in a row."""
    rng = rng or np.random.default_rng(0)
    distinct = [rng.integers(4, VOCABULARY, rng.integers(3, 28)) for _ in range(-(-n // same))]
    return [prompt for prompt in distinct for _ in range(same)][:n]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_stored_logprobs_equal_the_trainers(model, engine, temperature):
    """Cases 3f, 3g and 4: prefill, decoding token by token and a cache kept over three turns give the log-probabilities
    of one full forward pass, at the temperature that was sampled; so the first ratio is 1."""
    histories, sampled = play(engine, prompts_of(40), range(40), sampling=Sampling(temperature))
    expected = teacher_forced(model, histories, temperature)
    got = np.array([logprob for row in sampled for _, logprob in row])
    want = np.array([expected[r][position] for r, row in enumerate(sampled) for position, _ in row])
    assert len(got) > 200
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(np.exp(want - got), 1.0, atol=2e-5)


def test_a_row_does_not_depend_on_its_batch(model, engine):
    """The same prompt and seed give the same tokens alone, among other rows, in other slots, lanes and batch sizes."""
    prompts, seeds = prompts_of(40), np.arange(40)
    histories, sampled = play(engine, prompts, seeds)
    order = np.random.default_rng(1).permutation(40)
    mixed, _ = play(engine, [prompts[i] for i in order], seeds[order])
    assert [mixed[i] for i in np.argsort(order)] == histories
    alone, logprobs = play(engine, [prompts[7]], [7])
    assert alone[0] == histories[7]
    np.testing.assert_allclose([x for _, x in logprobs[0]], [x for _, x in sampled[7]], atol=1e-5)
    lanes, _ = play(Engine(model, CONFIG, STOP, lanes=3), prompts, seeds)
    assert lanes == histories


def test_repeated_runs_are_bitwise_equal(engine):
    first = play(engine, prompts_of(40), range(40))
    assert play(engine, prompts_of(40), range(40)) == first
    assert play(engine, prompts_of(40), range(100, 140))[0] != first[0]


def test_group_members_differ_though_they_share_a_prompt(engine):
    histories, sampled = play(engine, prompts_of(8, same=8), range(8), turns=1)
    assert len({tuple(h[row[0][0] :][: len(row)]) for h, row in zip(histories, sampled, strict=True)}) == 8


def test_greedy_takes_the_likeliest_token(model, engine):
    histories, sampled = play(engine, prompts_of(6, same=1), range(6), turns=1, sampling=Sampling(0.0), limits=4)
    assert all(np.isnan(logprob) for row in sampled for _, logprob in row)
    ids = np.array([h[: sampled[0][0][0]] for h in histories[:1]])
    hidden = model(ids, np.arange(ids.shape[1])[None], np.ones_like(ids))
    assert histories[0][ids.shape[1]] == int(model.logits(hidden)[0, -1].argmax())


def test_new_parameters_take_effect(model, engine):
    """No stale weights: after `set_params` the log-probabilities are those of the new policy."""
    other = Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(9))
    engine.set_params(nnx.state(other, nnx.Param), 5)
    try:
        assert engine.version == 5
        histories, sampled = play(engine, prompts_of(4), range(4), turns=1)
        expected = teacher_forced(other, histories)
        for r, row in enumerate(sampled):
            np.testing.assert_allclose([x for _, x in row], [expected[r][p] for p, _ in row], atol=1e-5)
    finally:
        engine.set_params(nnx.state(model, nnx.Param), 0)


def test_limits_and_context_are_kept(engine):
    prompt = np.full(CONFIG.context - 5, 7, np.int32)
    engine.begin([prompt, prompt[:20], prompt[:20]], np.array([1, 2, 3], np.uint64), Sampling(1.0))
    turns = engine.sample_turn(np.array([0, 1, 2]), np.array([50, 2, 0]))
    assert len(turns[0].ids) <= 5 and len(turns[1].ids) <= 2 and len(turns[2].ids) == 0 and not turns[2].stopped
    with pytest.raises(ConfigError, match="rollout.context"):
        engine.begin([np.zeros(CONFIG.context, np.int32)], np.zeros(1, np.uint64), Sampling(1.0))
    with pytest.raises(ValueError, match="slots"):
        engine.begin([prompt] * 49, np.zeros(49, np.uint64), Sampling(1.0))


def test_context_beyond_the_policy_is_refused(model):
    with pytest.raises(ConfigError, match="policy.max_length"):
        Engine(model, dataclasses.replace(CONFIG, context=300), STOP)


def test_compiled_programs_are_bounded(model):
    """However the rows' lengths and limits fall, only bucketed shapes are compiled, and a second run compiles none."""
    engine = Engine(model, CONFIG, STOP, lanes=1)
    bound = (len(batch_buckets(CONFIG.slots)) + len(CHUNKS)) * len(length_buckets(CONFIG.context))
    rng = np.random.default_rng(3)
    for n in (40, 33, 48):
        play(engine, prompts_of(n, rng, same=2), range(n), turns=2)
    seen = engine.compiled
    assert 0 < seen <= bound
    for salt in (1, 2):
        play(engine, prompts_of(44), range(44), turns=2, salt=salt, sampling=Sampling(0.7))
    assert engine.compiled <= bound


def test_bfloat16_cache_stays_close(model):
    """Noise floor of a bf16 cache: reported by the tolerance, not hidden."""
    engine = Engine(model, dataclasses.replace(CONFIG, cache_dtype="bfloat16", slots=8), STOP, lanes=1)
    histories, sampled = play(engine, prompts_of(4), range(4), turns=2)
    expected = teacher_forced(model, histories)
    error = [abs(x - expected[r][p]) for r, row in enumerate(sampled) for p, x in row]
    assert 0 < max(error) < 0.1


def test_buckets():
    assert length_buckets(512) == [128, 192, 256, 384, 512] and length_buckets(100) == [128]
    assert length_buckets(600) == [128, 192, 256, 384, 512, 640]
    assert batch_buckets(128) == [16, 64, 128] and batch_buckets(5) == [8] and batch_buckets(24) == [16, 32]
