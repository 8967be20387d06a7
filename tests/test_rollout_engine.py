"""The engine against the plain forward pass of the policy, and against itself in other company."""

import dataclasses
import queue

import jax
import numpy as np
import pytest
from flax import nnx
from helpers_rollout import CONFIG, POLICY, STOP, VOCABULARY, live, prompts_of

from trace_jax.config import ConfigError
from trace_jax.policy.transformer import Transformer, token_logprobs
from trace_jax.rollout import engine as engine_module
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.programs import Chunk, length_buckets, next_chunk
from trace_jax.rollout.sampling import Sampling

pytestmark = pytest.mark.xdist_group("engine")  # one worker compiles it


@pytest.fixture(scope="module")
def model():
    return Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, CONFIG, STOP, lanes=1)


@pytest.fixture(scope="module")
def reference(engine):
    """40 rows, three turns each, all in flight together."""
    return live(engine, prompts_of(40), range(40))


_forward = jax.jit(
    lambda params, structure, ids, positions, segments, temperature: token_logprobs(
        nnx.merge(structure, params),
        nnx.merge(structure, params)(ids, positions, segments)[:, :-1],
        ids[:, 1:],
        temperature,
    )[0],
    static_argnums=(1,),
)


def teacher_forced(model, lives, temperature=1.0):
    """Log-probability of every token of each row, from one full forward pass of the trainer's code."""
    structure, params = nnx.split(model)
    ids = np.zeros((len(lives), CONFIG.context), np.int32)
    for row, life in zip(ids, lives, strict=True):
        row[: len(life.ids)] = life.ids
    positions = np.broadcast_to(np.arange(CONFIG.context), ids.shape)
    segments = (positions < np.array([[len(life.ids)] for life in lives])).astype(np.int32)
    out = np.asarray(_forward(params, structure, ids, positions, segments, temperature))
    return [np.concatenate([[0.0], row[: len(life.ids) - 1]]) for row, life in zip(out, lives, strict=True)]


def assert_trainer_agrees(model, lives, temperature=1.0, atol=1e-5):
    expected = teacher_forced(model, lives, temperature)
    got = np.array([value for life in lives for _, value in life.sampled])
    want = np.array([expected[r][position] for r, life in enumerate(lives) for position, _ in life.sampled])
    np.testing.assert_allclose(got, want, atol=atol)


def assert_same(lives, others, exactly=True):
    """The same ids and the same log-probabilities, to the last bit or nearly."""
    assert [life.ids for life in lives] == [life.ids for life in others]
    for life, other in zip(lives, others, strict=True):
        if exactly:
            assert life.sampled == other.sampled
        else:
            np.testing.assert_allclose([x for _, x in life.sampled], [x for _, x in other.sampled], atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_stored_logprobs_equal_the_trainers(model, engine, temperature):
    """Cases 3f, 3g and 4: prefill, decoding token by token and a cache kept over three turns give the log-probabilities
    of one full forward pass, at the temperature that was sampled; so the first ratio is 1."""
    lives = live(engine, prompts_of(40), range(40), sampling=Sampling(temperature))
    assert sum(len(life.sampled) for life in lives) > 200
    assert_trainer_agrees(model, lives, temperature)
    for life in lives:
        for turn in life.turns:
            assert len(turn.ids) == len(turn.logprobs) and turn.stopped == (turn.ids[-1] == STOP)
            assert STOP not in turn.ids[:-1] and (turn.stopped or len(turn.ids) == 24)
            assert (turn.version, turn.stale, turn.kept) == (0, False, None)


def test_continuous_batching_equals_one_at_a_time(model, engine, reference):
    """Token for token and bit for bit: alone, a few in flight, waiting in any order, in other slots and lanes."""
    prompts, seeds = prompts_of(40), np.arange(40)
    alone = [live(engine, [prompts[i]], [seeds[i]])[0] for i in (0, 7, 21, 39)]
    assert_same(alone, [reference[i] for i in (0, 7, 21, 39)])
    for disorder in range(3):
        assert_same(live(engine, prompts, seeds, disorder=disorder, window=(5, 17, 48)[disorder]), reference)
    order = np.random.default_rng(1).permutation(40)
    mixed = live(engine, [prompts[i] for i in order], seeds[order])
    assert_same([mixed[i] for i in np.argsort(order)], reference)


def test_lanes_and_group_sizes_change_no_token(model, reference, monkeypatch):
    assert_same(
        live(Engine(model, CONFIG, STOP, lanes=3), prompts_of(40), range(40), disorder=1), reference, exactly=False
    )
    monkeypatch.setattr(engine_module, "CPU_GROUP", 4)
    small = Engine(model, CONFIG, STOP, lanes=2)
    lives = live(small, prompts_of(40), range(40))
    assert_same(lives, reference, exactly=False)
    assert_same(live(small, prompts_of(40), range(40), disorder=3, window=11), lives)


@pytest.mark.parametrize("shapes", [(Chunk(192, 3),), (Chunk(8, 2),), (Chunk(16, 1), Chunk(4, 5))])
def test_chunked_prefill_equals_whole(model, reference, shapes, monkeypatch):
    """Prompts and observations fed whole, or in pieces, leave the same tokens."""
    monkeypatch.setattr(engine_module, "chunks", lambda: shapes)
    assert_same(live(Engine(model, CONFIG, STOP, lanes=1), prompts_of(40), range(40)), reference, exactly=False)


def test_cache_kept_equals_fed_anew(model, reference):
    """With reuse off every turn feeds the whole row again: same tokens, the work is what differs."""
    anew = Engine(model, CONFIG, STOP, lanes=1, reuse=False)
    lives = live(anew, prompts_of(40), range(40))
    assert_same(lives, reference, exactly=False)
    fed = sum(sum(turn_start - 1 for turn_start in starts(life)) for life in lives)
    assert anew.stats.prefill_tokens == fed and anew.stats.shared_tokens == 0


def starts(life):
    """Length of the row at the start of each turn."""
    before = np.cumsum([0, *(len(turn.ids) for turn in life.turns[:-1])])
    return [life.sampled[n][0] for n in before]


def test_kept_cache_feeds_only_what_is_new(model, reference):
    """With reuse: prompts once a group, then of each observation all but the last token, and the stop token."""
    kept = Engine(model, CONFIG, STOP, lanes=1)
    prompts = prompts_of(40)
    lives = live(kept, prompts, range(40))
    distinct = {tuple(p) for p in prompts}
    ends = [[start + len(t.ids) for start, t in zip(starts(life), life.turns, strict=True)] for life in lives]
    between = sum(
        start - (end - 1) - 1
        for life, e in zip(lives, ends, strict=True)
        for start, end in zip(starts(life)[1:], e[:-1], strict=True)
    )
    assert kept.stats.prefill_tokens == sum(len(p) - 1 for p in distinct) + between
    assert kept.stats.shared_tokens == sum(len(p) - 1 for p in prompts) - sum(len(p) - 1 for p in distinct)
    assert kept.stats.sampled_tokens == sum(len(t.ids) for life in lives for t in life.turns)
    assert 0 < kept.stats.occupancy <= 1


def test_prefixes_are_shared_across_rows_in_flight_and_gone(model, monkeypatch):
    """A long system prompt is fed once, in whole chunks of the widest kind, whoever comes later; nothing changes."""
    monkeypatch.setattr(engine_module, "chunks", lambda: (Chunk(16, 4), Chunk(4, 4)))
    rng = np.random.default_rng(5)
    system = rng.integers(4, VOCABULARY, 50)
    prompts = [np.concatenate([system, rng.integers(4, VOCABULARY, 5 + i)]) for i in range(12)]
    sharing, plain = (Engine(model, CONFIG, STOP, lanes=1, reuse=reuse) for reuse in (True, False))
    lives = live(sharing, prompts, range(12), turns=1, window=3)
    assert sharing.stats.shared_tokens == 11 * 48  # 50 shared tokens hold three chunks of 16
    assert_same(lives, live(plain, prompts, range(12), turns=1))


def test_repeated_runs_are_bitwise_equal(engine, reference):
    assert_same(live(engine, prompts_of(40), range(40)), reference)
    other = live(engine, prompts_of(40), range(100, 140))
    assert [life.ids for life in other] != [life.ids for life in reference]


def test_group_members_differ_though_they_share_a_prompt(engine):
    lives = live(engine, prompts_of(8, same=8), range(8), turns=1)
    assert len({tuple(life.turns[0].ids) for life in lives}) == 8


def test_greedy_takes_the_likeliest_token(model, engine):
    lives = live(engine, prompts_of(6, same=1), range(6), turns=1, sampling=Sampling(0.0), limit=4)
    assert all(np.isnan(value) for life in lives for _, value in life.sampled)
    ids = np.zeros((6, 32), np.int32)
    for row, life in zip(ids, lives, strict=True):
        row[: life.sampled[0][0]] = life.ids[: life.sampled[0][0]]
    hidden = nnx.jit(lambda m, *args: m(*args))(model, ids, np.tile(np.arange(32), (6, 1)), np.ones_like(ids))
    for row, life in enumerate(lives):  # causal: what lies behind the prompt does not matter
        assert life.turns[0].ids[0] == int(model.logits(hidden)[row, life.sampled[0][0] - 1].argmax())


def test_truncated_sampling_records_what_could_have_been_drawn(engine):
    lives = live(engine, prompts_of(8), range(8), turns=2, sampling=Sampling(1.0, top_k=5))
    for life in lives:
        for turn in life.turns:
            assert turn.kept.shape == (len(turn.ids), 5)
            assert all(i in row for i, row in zip(turn.ids, turn.kept, strict=True))


def test_limits_and_context_are_kept(engine):
    prompt = np.full(CONFIG.context - 5, 7, np.int32)
    arrived = queue.SimpleQueue()
    engine.begin(Sampling(1.0), arrived.put)
    try:
        for row, (ids, limit) in enumerate([(prompt, 50), (prompt[:20], 2), (prompt[:20], 0)]):
            engine.start(row, ids, row, limit)
        turns = {turn.row: turn for turn in (arrived.get(timeout=60) for _ in range(3))}
        assert len(turns[0].ids) <= 5 and len(turns[1].ids) <= 2
        assert len(turns[2].ids) == 0 and not turns[2].stopped
        with pytest.raises(ConfigError, match="rollout.context"):
            engine.start(3, np.zeros(CONFIG.context, np.int32), 0, 5)
        with pytest.raises(ValueError, match="exists"):
            engine.start(0, prompt, 0, 5)
        for row in range(3, 48):
            engine.start(row, prompt[:4], 0, 1)
        with pytest.raises(ValueError, match="slots"):
            engine.start(99, prompt[:4], 0, 1)
    finally:
        engine.end()


def test_released_rows_deliver_no_more_than_the_turn_at_hand(engine, reference):
    """A row that is given up in the middle of a turn frees its slot; the others are untouched."""
    arrived = queue.SimpleQueue()
    prompts = prompts_of(40)
    engine.begin(Sampling(1.0), arrived.put)
    try:
        for row in range(40):
            engine.start(row, prompts[row], row, 24)
        engine.release(5)
        engine.start(77, prompts[5], 5, 24)
        turns = {}
        while len(turns.keys() - {5}) < 40:
            turn = arrived.get(timeout=60)
            turns[turn.row] = turn
        assert turns[77].ids.tolist() == reference[5].turns[0].ids.tolist()
        assert all(turns[i].ids.tolist() == reference[i].turns[0].ids.tolist() for i in range(40) if i != 5)
    finally:
        engine.end()


def test_an_error_in_a_lane_is_delivered(model):
    engine = Engine(model, CONFIG, STOP, lanes=1)
    arrived = queue.SimpleQueue()
    engine._programs.prefill = lambda *_, **__: 1 / 0
    engine.begin(Sampling(1.0), arrived.put)
    engine.start(0, np.arange(4, 20), 0, 5)
    assert isinstance(arrived.get(timeout=60), ZeroDivisionError)
    engine.end()


def test_context_beyond_the_policy_is_refused(model):
    with pytest.raises(ConfigError, match="policy.max_length"):
        Engine(model, dataclasses.replace(CONFIG, context=300), STOP)


def test_compiled_programs_are_bounded(model):
    """However the rows' lengths and limits fall, only bucketed shapes are compiled, and a second run compiles none."""
    engine = Engine(model, CONFIG, STOP, lanes=2)
    rng = np.random.default_rng(3)
    for n in (40, 33, 48):
        live(engine, prompts_of(n, rng, same=2), range(n), turns=2, disorder=n)
    seen = engine.compiled
    assert 0 < seen <= engine.compile_bound
    for salt in (1, 2):
        live(engine, prompts_of(44), range(44), turns=2, salt=salt, sampling=Sampling(0.7))
    assert engine.compiled <= engine.compile_bound


def test_bfloat16_cache_stays_close(model):
    """Noise floor of a bf16 cache: reported by the tolerance, not hidden."""
    engine = Engine(model, dataclasses.replace(CONFIG, cache_dtype="bfloat16", slots=8), STOP, lanes=1)
    lives = live(engine, prompts_of(4), range(4), turns=2)
    expected = teacher_forced(model, lives)
    error = [abs(x - expected[r][p]) for r, life in enumerate(lives) for p, x in life.sampled]
    assert 0 < max(error) < 0.1


def test_buckets():
    assert length_buckets(512, 64) == [128, 192, 256, 384, 512] and length_buckets(100, 64) == [128]
    assert length_buckets(600, 64) == [128, 192, 256, 384, 512, 640]
    assert length_buckets(600, 128) == [128, 256, 384, 512, 640]
    shapes = (Chunk(128, 4), Chunk(32, 4), Chunk(16, 8))
    widths = [next_chunk(shapes, left).width for left in (1, 8, 16, 17, 32, 40, 64, 100, 128, 129, 500)]
    assert widths == [16, 16, 16, 32, 32, 32, 128, 128, 128, 128, 128]
