"""The learner scores the distribution that was sampled, truncated ones too (case 4 of trainer)."""

import functools
from types import SimpleNamespace

import helpers_rollout
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import ConfigError, GRPOConfig, MeshConfig, OptimizerConfig, PolicyConfig
from trace_jax.learner import sharding
from trace_jax.learner.credit import grpo_sequences
from trace_jax.learner.objectives import grpo_objective
from trace_jax.learner.packing import Sequence, pack, unpack
from trace_jax.learner.step import Learner, transformer_logprobs
from trace_jax.policy.transformer import Transformer, logical_axes, token_logprobs
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.sampling import Sampling, draw, token_keys
from trace_jax.rollout.trajectory import Trajectory

TINY = PolicyConfig(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=64, max_length=64)
SHARES = np.array([0.5, 0.3, 0.15, 0.05])
PROMPT, LENGTH = 4, 20
OBSERVED = range(10, 13)  # positions of a tool's answer
COUNT = 6  # trajectories; in batches of one shape, as few programs as the cases allow
ROWS = (2 * LENGTH, 2)  # two micro-batches
TERMS = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}


@functools.cache
def fixed_policy():
    """A transformer whose next-token distribution is `SHARES` at every position."""
    model = Transformer(PolicyConfig(**{**vars(TINY), "tie_embeddings": False}), len(SHARES), rngs=nnx.Rngs(0))
    model.embedding[...] = jnp.ones_like(model.embedding[...])
    for silent in (model.output, model.down):
        silent[...] = jnp.zeros_like(silent[...])
    model.head[...] = jnp.tile(jnp.log(SHARES) / TINY.width, (TINY.width, 1)).astype(jnp.float32)
    return model


@functools.cache
def random_policy():
    model = Transformer(TINY, 48, rngs=nnx.Rngs(1))
    model.embedding[...] = 3 * model.embedding[...]  # far from uniform
    return model


@functools.partial(jax.jit, static_argnames=("graphdef", "greedy", "top_k", "truncate"))
def next_tokens(graphdef, params, ids, seeds, t, knobs, **static):
    model, positions = nnx.merge(graphdef, params), jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
    hidden = model(ids, positions, jnp.ones_like(ids))[:, t - 1]
    return draw(token_keys(seeds, jnp.full(len(ids), t)), model.logits(hidden), knobs, **static)


def sample(model, sampling):
    """Trajectories drawn token by token from whole forward passes, with a tool's answer in the middle."""
    rng = np.random.default_rng(0)
    ids = np.zeros((COUNT, LENGTH), np.int32)
    ids[:, :PROMPT] = rng.integers(0, model.vocab_size, (COUNT, PROMPT))
    logprobs = np.zeros((COUNT, LENGTH), np.float32)
    kept = np.full((COUNT, LENGTH, sampling.top_k), -1, np.int32)
    mask = np.isin(np.arange(LENGTH), [t for t in range(PROMPT, LENGTH) if t not in OBSERVED])
    seeds = np.stack([np.zeros(COUNT), np.arange(COUNT)], 1).astype(np.uint32)
    split = nnx.split(model, nnx.Param)
    for t in range(PROMPT, LENGTH):
        if t in OBSERVED:
            ids[:, t] = rng.integers(0, model.vocab_size, COUNT)
            continue
        drawn = next_tokens(*split, ids, seeds, t, sampling.knobs, **sampling.static)
        ids[:, t], logprobs[:, t], left = (None if x is None else np.asarray(x) for x in drawn)
        if left is not None:
            kept[:, t] = left
    return [
        Trajectory(
            ids=ids[i],
            loss_mask=mask,
            logprobs=logprobs[i],
            turn_index=np.where(mask, 0, -1).astype(np.int32),
            versions=(0,),
            status="finished",
            task_index=0,
            sample=i,
            reward=float(i % 2),
            kept=kept[i] if sampling.top_k else None,
        )
        for i in range(COUNT)
    ]


@functools.cache
def learner_of(policy, temperature=1.0, **config):
    """A learner, shared by those that ask for the same one; parameters and configuration."""
    graphdef, params = nnx.split(model := policy(), nnx.Param)
    config = GRPOConfig(**config)
    learner = Learner(
        transformer_logprobs(graphdef, temperature), grpo_objective(config), OptimizerConfig(warmup_steps=0),
        10, sharding.make_mesh(MeshConfig(), jax.devices()[:1]), logical_axes(model),
    )  # fmt: skip
    return learner, params, config


SAMPLERS = [
    Sampling(1.0, top_k=2),
    Sampling(0.5),
    Sampling(0.7, top_k=3, top_p=0.9),
    Sampling(1.3, top_k=3, min_p=0.2),
    Sampling(1.0, top_k=9, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize(
    ("policy", "sampling"),
    # The fixed policy has fewer ids than the last one leaves.
    [*((random_policy, s) for s in SAMPLERS), *((fixed_policy, SAMPLERS[i]) for i in (0, 1, 4))],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_first_ratio_is_one(policy, sampling):
    """Case 4: exp(trainer - sampler) is 1 under any temperature and truncation. Trajectory -> credit -> packed rows ->
    learner, as in training."""
    trajectories = sample(policy(), sampling)
    learner, params, config = learner_of(policy, sampling.temperature)
    sequences, _, _ = grpo_sequences(trajectories, config)
    batches = pack(sequences, *ROWS, sampling.top_k)
    scores = unpack(learner.logprobs(params, batches), [LENGTH] * COUNT, ROWS[0])
    for t, score in zip(trajectories, scores, strict=True):
        np.testing.assert_allclose(np.exp(score - t.logprobs)[t.loss_mask], 1.0, atol=1e-5)


@pytest.mark.parametrize("sampling", [SAMPLERS[1], SAMPLERS[2]], ids=str)
def test_the_first_step_sees_no_distance(sampling):
    """Case 4: in the metrics of the first step the ratio is 1, and the KL to a reference equal to the policy is 0."""
    trajectories = sample(random_policy(), sampling)
    learner, params, config = learner_of(random_policy, sampling.temperature, **TERMS)
    sequences, _, _ = grpo_sequences(trajectories, config)
    batches = learner.with_reference(learner.place(params), pack(sequences, *ROWS, sampling.top_k))
    _, metrics = learner.step(learner.init(params), batches)
    assert metrics["tokens"] == COUNT * sum(trajectories[0].loss_mask)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5) and metrics["logprob_gap"] < 1e-5
    assert metrics["reference_kl"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["skipped"] == 0 and metrics["grad_norm"] > 0


def test_replay_of_the_fixed_distribution():
    """Case 4: ln 0.625 = -0.4700 for token 0 at T=1 and top_k=2 on both sides; a learner that scores the whole
    vocabulary instead finds 0.8, the kept mass, on every token. T=0.5: -0.378436 on both sides."""
    for sampling, token0 in ((Sampling(1.0, top_k=2), np.log(0.625)), (Sampling(0.5), -0.378436)):
        trajectories = sample(fixed_policy(), sampling)
        learner, params, config = learner_of(fixed_policy, sampling.temperature)
        sequences, _, _ = grpo_sequences(trajectories, config)
        batches = pack(sequences, *ROWS, sampling.top_k)
        scores = unpack(learner.logprobs(params, batches), [LENGTH] * COUNT, ROWS[0])
        zeros = 0
        for t, score in zip(trajectories, scores, strict=True):
            chosen = t.loss_mask & (t.ids == 0)
            zeros += chosen.sum()
            np.testing.assert_allclose(t.logprobs[chosen], token0, atol=1e-5)
            np.testing.assert_allclose(score[chosen], token0, atol=1e-5)
            if sampling.top_k:
                whole = np.log(SHARES)[t.ids]
                np.testing.assert_allclose(np.exp(whole - t.logprobs)[t.loss_mask], 0.8, atol=1e-5)
                # what the replay says of tokens that were not sampled is the whole vocabulary's
                np.testing.assert_allclose(score[~t.loss_mask][1:], whole[~t.loss_mask][1:], atol=1e-5)
        assert zeros > 10


def test_turns_of_the_engine_are_replayed():
    """Case 4 through the engine: prefill, a cache kept over three turns, decoding in steps, kept sets with every turn;
    the learner's whole forward pass over the same kept sets gives the same log-probabilities."""
    model = Transformer(helpers_rollout.POLICY, helpers_rollout.VOCABULARY, rngs=nnx.Rngs(1))
    model.embedding[...] = 3 * model.embedding[...]
    sampling = Sampling(0.8, top_k=6, top_p=0.95, min_p=0.02)
    engine = Engine(model, helpers_rollout.CONFIG, helpers_rollout.STOP)
    prompts = helpers_rollout.prompts_of(12)
    lives = helpers_rollout.live(engine, prompts, range(12), sampling=sampling)
    sequences, stored = [], []
    for life in lives:
        positions, logprobs = map(np.asarray, zip(*life.sampled, strict=True))
        kept = np.full((len(life.ids), 6), -1, np.int32)
        kept[positions] = np.concatenate([turn.kept for turn in life.turns])
        sequences.append(Sequence(np.array(life.ids), np.isin(np.arange(len(life.ids)), positions), kept=kept))
        stored.append(logprobs)
    learner, params, _ = learner_of.__wrapped__(lambda: model, sampling.temperature)
    lengths = [len(s) for s in sequences]
    scores = unpack(learner.logprobs(params, pack(sequences, 256, 4, 6)), lengths, 256)
    for s, score, logprobs in zip(sequences, scores, stored, strict=True):
        np.testing.assert_allclose(np.exp(score[s.loss_mask] - logprobs), 1.0, atol=1e-5)
    trained = np.concatenate([s.kept[s.loss_mask] for s in sequences])
    assert len(trained) > 100 and (trained[:, 5] < 0).any() and (trained[:, 1] >= 0).any()


def test_unrecorded_trajectories_do_not_reach_the_learner():
    """Case 4: log-probabilities that were withheld (greedy, top-p without top-k) are refused, not trained on."""
    trajectories = sample(fixed_policy(), Sampling())
    trajectories[0].logprobs[trajectories[0].loss_mask] = np.nan
    with pytest.raises(ConfigError, match="greedily, or truncated without a top_k"):
        grpo_sequences(trajectories, GRPOConfig())


def test_kept_ids_of_tokens_that_are_not_trained_have_no_effect():
    """Case 1 of trainer, for the kept sets: loss and gradient are bitwise the same whatever stands there."""
    trajectories = sample(random_policy(), SAMPLERS[2])
    learner, params, config = learner_of(random_policy, SAMPLERS[2].temperature, **TERMS)
    updates = []
    for filler in (-1, 5):
        for t in trajectories:
            t.kept[~t.loss_mask] = filler
        sequences, _, _ = grpo_sequences(trajectories, config)
        batches = learner.with_reference(learner.place(params), pack(sequences, *ROWS, 3))
        state, metrics = learner.step(learner.init(params), batches)
        updates.append((jax.tree.leaves(state.params), metrics["loss"], metrics["grad_norm"]))
    assert updates[0][1:] == updates[1][1:]
    assert all(np.array_equal(a, b) for a, b in zip(updates[0][0], updates[1][0], strict=True))


def test_replay_compiles_nothing_new():
    """One set of programs for steps of any number of micro-batches, also when nothing carries a gradient."""
    trajectories, temperature = sample(random_policy(), SAMPLERS[2]), SAMPLERS[2].temperature
    # One of its own: the programs of others do not count.
    learner, params, config = learner_of.__wrapped__(random_policy, temperature, **TERMS)
    sequences, _, _ = grpo_sequences(trajectories, config)
    state = learner.init(params)
    for part in (sequences, sequences[:1], []):
        batches = learner.with_reference(learner.place(params), pack(part, *ROWS, 3))
        state, _ = learner.step(state, batches)
    assert learner.compilations() == 3
    assert all(batch.kept is None for batch in pack([], LENGTH, 2))  # the usual path has no such stream


def reference(hidden, weight, targets, kept, temperature):
    """Log-probabilities and entropies by definition, float64, one token at a time."""
    result = np.zeros((2, *targets.shape))
    for at in np.ndindex(targets.shape):
        scores = hidden[at] @ weight / temperature
        ids = [int(i) for i in kept[at] if i >= 0] or list(range(weight.shape[1]))
        weights = {i: np.exp(scores[i] - scores[ids].max()) for i in ids}
        shares = {i: w / sum(weights.values()) for i, w in weights.items()}
        result[(0, *at)] = np.log(shares[int(targets[at])])
        result[(1, *at)] = -sum(p * np.log(p) for p in shares.values() if p > 0)
    return result


@jax.jit
def scored(hidden, weight, targets, kept, temperature):
    model = SimpleNamespace(output_matrix=lambda: weight.T)
    return jnp.stack(token_logprobs(model, hidden, targets, temperature, 4, kept))


@jax.jit
def gradients(mix, hidden, *rest):
    return jax.grad(lambda h: jnp.sum(mix * scored(h, *rest)))(hidden)


@st.composite
def cases(draw_):
    """Hidden states, head, targets, and kept ids with the target at any place among them, or none."""
    rng = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    rows, time, width, vocabulary, k = 2, 3, 4, 11, draw_(st.sampled_from([1, 4]))
    targets = rng.integers(0, vocabulary, (rows, time))
    kept = np.full((rows, time, k), -1)
    for at in np.ndindex(rows, time):
        count = int(rng.integers(0, k + 1))
        if count:
            others = rng.permutation(np.delete(np.arange(vocabulary), targets[at]))[: count - 1]
            kept[at][rng.permutation(k)[:count]] = rng.permutation([targets[at], *others])
    hidden, weight = rng.normal(size=(rows, time, width)), 2 * rng.normal(size=(width, vocabulary))
    return hidden, weight, targets, kept, draw_(st.sampled_from([0.5, 1.0, 2.0]))


@settings(max_examples=30, deadline=None)
@given(cases())
def test_truncated_scores_and_their_gradients_against_numpy(case):
    """Values against the definition in float64; gradients against its central differences."""
    hidden, weight, targets, kept, temperature = case
    rest = (weight.astype(np.float32), targets.astype(np.int32), kept.astype(np.int32), np.float32(temperature))
    wide = hidden.astype(np.float32)
    np.testing.assert_allclose(scored(wide, *rest), reference(hidden, *case[1:]), atol=1e-4)
    mix = np.random.default_rng(0).normal(size=(2, *targets.shape)).astype(np.float32)
    gradient = np.asarray(gradients(mix, wide, *rest))
    for at in np.ndindex(hidden.shape):
        moved = np.zeros_like(hidden)
        moved[at] = 1e-5
        ends = [np.sum(mix * reference(hidden + sign * moved, *case[1:])) for sign in (1, -1)]
        assert gradient[at] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=2e-3, rel=2e-3)


def test_no_array_of_all_scores():
    """Value and gradient over kept ids need far less memory than scores of every token would."""
    tokens, vocabulary = 4096, 2000
    weight = jnp.zeros((8, vocabulary))
    model = SimpleNamespace(output_matrix=lambda: weight.T)

    def loss(hidden, targets, kept):
        return sum(jnp.sum(x) for x in token_logprobs(model, hidden, targets, chunk=64, kept=kept))

    shapes = (
        jax.ShapeDtypeStruct((4, tokens // 4, 8), jnp.float32),
        jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32),
        jax.ShapeDtypeStruct((4, tokens // 4, 5), jnp.int32),
    )
    compiled = jax.jit(jax.value_and_grad(loss)).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * vocabulary * 4 / 8
