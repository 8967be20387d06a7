"""The optimizer step, on a toy policy."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import ConfigError, GRPOConfig, MeshConfig, OptimizerConfig
from trace_jax.learner import sharding
from trace_jax.learner.objectives import grpo_objective, policy_objective, sft_objective
from trace_jax.learner.packing import Sequence, empty_batch, pack
from trace_jax.learner.step import Learner, learning_rate

VOCAB = 12
AXES = {"table": ("vocab", "embed"), "gain": ("embed",)}


def toy_logprobs(params, batch):
    """A bigram policy: the row of the previous token, scaled."""
    scores = (params["table"] * params["gain"])[jnp.roll(batch.ids, 1, axis=1)]
    logp = jax.nn.log_softmax(scores)
    chosen = jnp.take_along_axis(logp, batch.ids[..., None], axis=-1)[..., 0]
    inside = batch.positions > 0
    return jnp.where(inside, chosen, 0.0), jnp.where(inside, -jnp.sum(jnp.exp(logp) * logp, -1), 0.0)


def toy_params(seed=0):
    table = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    return {"table": jnp.asarray(table), "gain": jnp.ones(VOCAB)}


def toy_learner(objective=None, steps=50, **optimizer):
    optimizer = OptimizerConfig(**{"learning_rate": 0.05, "warmup_steps": 0, **optimizer})
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    return Learner(toy_logprobs, objective or sft_objective(), optimizer, steps, mesh, AXES)


def toy_sequences(seed=0, count=9):
    rng = np.random.default_rng(seed)
    return [
        Sequence(rng.integers(0, VOCAB, n), np.arange(n) >= 2, float(rng.normal()), -2.0 - rng.random(n))
        for n in rng.integers(4, 16, count)
    ]


def assert_close(a, b, rtol=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_sum_constant"])
def test_update_does_not_depend_on_the_split(aggregation):
    """Case 5 of trainer: micro-batches, padding rows and packing leave metrics and gradients alone.

    One Adam step from zero moments hides the gradient's size, so the gradient norm is compared too.
    """
    objective = policy_objective(clip_low=0.2, clip_high=0.28, aggregation=aggregation, constant=16.0)
    results = []
    for length, rows in [(16, 16), (16, 3), (16, 1), (32, 4), (128, 1)]:
        learner = toy_learner(objective, eps=1.0)  # a large epsilon keeps the update proportional to the gradient
        batches = pack(toy_sequences(), length, rows)
        state, metrics = learner.step(learner.init(toy_params()), batches)
        results.append((state.params, {k: v for k, v in metrics.items() if k != "padding_share"}))
        padded = [empty_batch(length, rows), *batches, empty_batch(length, rows)]
        state2, metrics2 = learner.step(learner.init(toy_params()), padded)
        assert all(np.array_equal(state.params[k], state2.params[k]) for k in AXES)  # padding: bitwise
        assert metrics2["loss"] == metrics["loss"] and metrics2["grad_norm"] == metrics["grad_norm"]
    for params, metrics in results[1:]:
        assert_close(params, results[0][0])
        assert metrics == pytest.approx(results[0][1], rel=1e-5)


def test_metrics_of_one_split():
    """Case 5 of trainer: the reported loss is the token mean 1.75 divided once, whatever the micro-batches."""

    def scripted(params, batch):
        one = jnp.where(batch.loss_mask.sum(1, keepdims=True) == 1, -4.0, -1.0)
        return one * params["gain"][0] + 0.0 * params["table"].sum(), jnp.zeros(batch.ids.shape)

    sequences = [
        Sequence(np.arange(4), np.array([0, 1, 0, 0], bool)),
        Sequence(np.arange(4), np.array([0, 1, 1, 1], bool)),
    ]
    for rows in (1, 2, 3):
        mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
        learner = Learner(scripted, sft_objective(), OptimizerConfig(), 1, mesh, AXES)
        _, metrics = learner.step(learner.init(toy_params()), pack(sequences, 4, rows))
        assert metrics["loss"] == 1.75 and metrics["grad_norm"] == 1.75 and metrics["tokens"] == 4


def test_left_out_sequences_count_in_the_mean():
    """Sequences with advantage 0 may be left out of the batches when their denominator is handed over."""
    sequences = toy_sequences()
    silent = [Sequence(s.ids, s.loss_mask, 0.0, s.old_logprobs) for s in toy_sequences(1, 5)]
    learner = toy_learner(grpo_objective(GRPOConfig()), eps=1.0)
    whole, metrics = learner.step(learner.init(toy_params()), pack(sequences + silent, 16, 4))
    tokens = sum(int(s.loss_mask.sum()) for s in silent)
    part, metrics2 = learner.step(learner.init(toy_params()), pack(sequences, 16, 4), denominator=tokens)
    assert_close(whole.params, part.params)
    assert metrics["grad_norm"] == pytest.approx(metrics2["grad_norm"], rel=1e-5)


def test_three_adamw_steps_against_numpy():
    """AdamW (arXiv 1711.05101) with clipping and warm-up; decay on the matrix, not on the gain; float64 reference."""
    config = dict(learning_rate=0.1, warmup_steps=2, b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.1, clip_norm=0.05)
    learner = toy_learner(**config)
    params = toy_params()
    state = learner.init(params)
    want = {k: np.asarray(v, np.float64) for k, v in params.items()}
    m, v = ({k: np.zeros_like(x) for k, x in want.items()} for _ in range(2))
    for step in range(3):
        (batch,) = pack(toy_sequences(step), 128, 1)

        def loss(p, batch=batch):
            total, denominator, _ = sft_objective()(*toy_logprobs(p, batch), batch)
            return total / denominator

        grads = jax.grad(loss)({k: jnp.asarray(x, jnp.float32) for k, x in want.items()})
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in grads.values()))
        state, metrics = learner.step(state, [batch])
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > config["clip_norm"]
        rate = config["learning_rate"] * min(1, (step + 1) / 2)
        assert metrics["learning_rate"] == pytest.approx(rate)
        for k, g in grads.items():
            g = np.asarray(g, np.float64) * config["clip_norm"] / norm
            m[k] = 0.9 * m[k] + 0.1 * g
            v[k] = 0.98 * v[k] + 0.02 * g * g
            update = (m[k] / (1 - 0.9 ** (step + 1))) / (np.sqrt(v[k] / (1 - 0.98 ** (step + 1))) + 1e-8)
            want[k] = want[k] - rate * (update + (0.1 * want[k] if k == "table" else 0.0))
        assert_close(state.params, {k: np.asarray(x, np.float32) for k, x in want.items()}, rtol=2e-4)
    assert int(state.step) == 3


def test_one_program_for_each_shape_of_a_micro_batch():
    """Any number of micro-batches of three row lengths: 2 programs and 3; later steps compile nothing. Case 5 of
    trainer: which length a sequence was put in leaves the update alone."""
    learner = toy_learner(eps=1.0)
    short, long = [s for s in toy_sequences() if len(s) <= 8], [s for s in toy_sequences() if len(s) > 8]
    assert short and long
    bucketed, metrics = learner.step(learner.init(toy_params()), pack(short, 8, 4) + pack(long, 16, 2))
    assert learner.compilations() == 4
    whole, expected = learner.step(learner.init(toy_params()), pack(short + long, 32, 1))
    assert learner.compilations() == 5
    assert_close(bucketed.params, whole.params)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    state = bucketed
    for count in (3, 20, 1, 8):
        state, _ = learner.step(state, pack(toy_sequences(count, count), 16, 2) + pack(short, 8, 4))
    assert learner.compilations() == 5


def test_old_logprobs_of_the_learner():
    """With them the ratio is 1 before the update and not after it; what the sampler recorded stays as it was."""
    learner = toy_learner(grpo_objective(GRPOConfig()))
    state = learner.init(toy_params())
    sampled = pack(toy_sequences(), 16, 4)
    batches = learner.with_old(state.params, sampled)
    for before, after in zip(sampled, batches, strict=True):
        want = np.asarray(toy_logprobs(toy_params(), before)[0])
        np.testing.assert_allclose(after.old_logprobs[after.loss_mask], want[after.loss_mask], atol=1e-6)
        assert after.behaviour_logprobs is before.behaviour_logprobs
        assert np.array_equal(before.behaviour_logprobs, before.old_logprobs)
    state, metrics = learner.step(state, batches)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    _, metrics = learner.step(state, batches)
    assert metrics["ratio_max"] > 1.01


def test_gradients_are_those_of_the_mean_loss():
    learner, params = toy_learner(), toy_params()
    (whole,) = pack(toy_sequences(), 128, 1)

    def loss(params):
        total, denominator, _ = sft_objective()(*toy_logprobs(params, whole), whole)
        return total / (denominator + 7.0)

    got = learner.gradients(learner.place(params), pack(toy_sequences(), 16, 2), denominator=7.0)
    assert_close(got, jax.grad(loss)(params))


def test_buffers_are_donated():
    """State and sums are updated in place: the compiled programs alias them, and what was handed over is gone."""
    learner = toy_learner()
    state = learner.init(toy_params())
    batches = pack(toy_sequences(), 16, 2)
    old = jax.tree.leaves((state.params, state.opt_state))
    after, _ = learner.step(state, batches)
    assert all(x.is_deleted() for x in old) and not any(x.is_deleted() for x in jax.tree.leaves(after))
    zeros, _, apply = learner._programs
    size = sum(x.nbytes for x in jax.tree.leaves(after))
    compiled = apply.lower(after, zeros(), np.float32(0)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= size and "input_output_alias" in compiled.as_text()
    sums = sum(x.nbytes for x in jax.tree.leaves(zeros()))
    compiled = learner.lowered(after.params, batches[0]).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= sums


def test_nothing_but_the_state_stays_after_a_step():
    """Sums of gradients and micro-batches on the devices are gone: what samples next has the room."""

    def live():
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    learner = toy_learner()
    state, _ = learner.step(learner.init(toy_params()), pack(toy_sequences(), 16, 4))
    before = live()
    state, _ = learner.step(state, pack(toy_sequences(1), 16, 4))
    assert live() == before > 0


def test_training_reaches_the_optimum():
    """Cross-entropy falls to the entropy of the data: after token a always a + 1."""
    ids = np.arange(40) % VOCAB
    learner = toy_learner(learning_rate=0.3, weight_decay=0.0, clip_norm=10.0)
    state = learner.init(toy_params())
    for _ in range(40):
        state, metrics = learner.step(state, pack([Sequence(ids, np.arange(40) > 0)], 40, 1))
    assert metrics["loss"] < 0.01 and metrics["entropy"] < 0.1 and metrics["padding_share"] == 0.0


def test_a_step_that_cannot_help_changes_nothing():
    learner = toy_learner()
    state = learner.init(toy_params())
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = learner.step(state, [empty_batch(16, 2)])
    assert metrics["skipped"] == 1 and metrics["loss"] == 0 and int(state.step) == 1
    bad = [Sequence(np.arange(4), np.arange(4) > 1, weight=float("nan"))]
    state, metrics = learner.step(state, pack(bad, 16, 2))
    assert metrics["skipped"] == 1
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves((state.params, state.opt_state)), strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(ValueError, match="micro-batch"):
        learner.step(state, [])


def test_given_parameters_survive_and_reference_is_theirs():
    params = toy_params()
    learner = toy_learner(policy_objective(clip_low=0.2, clip_high=0.2, aggregation="token_mean", kl_coefficient=0.1))
    state = learner.init(params)
    batches = pack(toy_sequences(), 16, 4)
    state, metrics = learner.step(state, learner.with_reference(learner.place(params), batches))
    assert metrics["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    _, metrics = learner.step(state, learner.with_reference(learner.place(params), batches))
    assert metrics["reference_kl"] > 1e-5
    assert np.isfinite(params["table"]).all()


def test_learning_rate_schedules():
    cosine = learning_rate(
        OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_steps=4, final_fraction=0.1), 24
    )
    np.testing.assert_allclose(
        [cosine(s) for s in (0, 1, 3, 4, 14, 24, 99)], [0.25, 0.5, 1, 1, 0.55, 0.1, 0.1], rtol=1e-6
    )
    constant = learning_rate(OptimizerConfig(learning_rate=2.0, warmup_steps=0), 10)
    assert constant(0) == constant(9) == 2.0


def test_mesh_errors_are_one_line():
    device = jax.devices()[:1]
    with pytest.raises(ConfigError, match="does not cover 1 devices"):
        sharding.make_mesh(MeshConfig(fsdp=2), device)
    mesh = sharding.make_mesh(MeshConfig(), device)
    with pytest.raises(ConfigError, match="no rule"):
        sharding.spec(("colour",), (4,), mesh)
    with pytest.raises(ConfigError, match="map twice"):
        sharding.spec(("heads", "mlp"), (4, 4), mesh)
    with pytest.raises(ConfigError, match="declares"):
        sharding.spec(("heads",), (4, 4), mesh)
