"""Every objective against NumPy and finite differences, and what they have in common."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import objective_reference as reference
import pytest

from trace_jax.config import GRPOConfig
from trace_jax.learner.divergence import KL_ESTIMATORS, kl_loss
from trace_jax.learner.objectives import grpo_objective, policy_objective
from trace_jax.learner.packing import unpack
from trace_jax.learner.surrogates import OBJECTIVES, clipped_surrogate

# compiling is most of the time here
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
ROW = 60  # tokens: all of `random_streams`
SEQUENCE = {"aggregation": "seq_mean_token_mean", "clip_low": 0.03, "clip_high": 0.04}
NAMED = {
    "grpo": {"aggregation": "seq_mean_token_mean"},
    "dr_grpo": {"advantage_std": False, "aggregation": "seq_sum_constant", "aggregation_constant": 64.0},
    "dapo": {"constant_groups": "resample"},
    "gspo": SEQUENCE,
    "gspo_token": SEQUENCE,
    "cispo": {"clip_low": 1.0, "clip_high": 0.3},
}
LEARNER = {"old_policy": "learner"}
EXTRAS = {
    "bare": {},
    "dual clip, truncate, k1": {
        **LEARNER, "iterations": 2, "dual_clip": 1.3, "correction": "truncate", "correction_high": 1.2,
        "kl_coefficient": 0.3, "kl_estimator": "k1",
    },
    "token mask, k2": {
        **LEARNER, "correction": "mask_tokens", "correction_low": 0.8, "correction_high": 1.2,
        "kl_coefficient": 0.3, "kl_estimator": "k2",
    },
    "sequence mask, k3": {
        **LEARNER, "correction": "mask_sequences", "correction_low": 0.9, "correction_high": 1.2,
        "kl_coefficient": 0.3, "entropy_coefficient": 0.1,
    },
}  # fmt: skip


# every surrogate with every extra; names that share the surrogate of "grpo" once each
CASES = [(name, extra) for name in ("grpo", "gspo", "gspo_token", "cispo") for extra in EXTRAS]
CASES += [("dr_grpo", "dual clip, truncate, k1"), ("dapo", "token mask, k2")]


def test_the_table_is_covered():
    assert {name for name, _ in CASES} == set(NAMED) == set(OBJECTIVES)


def config_of(name, extra):
    extra = dict(EXTRAS[extra])
    if name == "cispo":
        extra.pop("dual_clip", None)
    return GRPOConfig(objective=name, **NAMED[name] | extra)


@cache
def compiled(objective):
    """(loss sum, (denominator, metric sums)), gradient. Every test has micro-batches of one row of `ROW` tokens."""

    def loss(logprobs, entropies, batch):
        total, denominator, sums = objective(logprobs, entropies, batch)
        return total, (denominator, sums)

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)


def summed(objective, parts):
    """Loss sum, denominator, gradients and metric sums over micro-batches, as the train step adds them."""
    results = [compiled(objective)(*part) for part in parts]
    return (
        sum(float(total) for (total, _), _ in results),
        sum(float(denominator) for (_, (denominator, _)), _ in results),
        [np.asarray(gradient) for _, gradient in results],
        {k: sum(float(sums[k]) for (_, (_, sums)), _ in results) for k in results[0][0][1][1]},
    )


@pytest.mark.parametrize(("name", "extra"), CASES)
def test_value_and_gradient(name, extra):
    """Against NumPy and finite differences in float64; what is constant under differentiation is held constant there.

    Cases 1(v) and 5 of trainer: packed in one row or one sequence a micro-batch, the same; infinities or NaN on masked
    tokens change no bit.
    """
    config = config_of(name, extra)
    objective = grpo_objective(config)
    acted = 0
    with jax.enable_x64(True):
        for seed in (0, 1, 2):
            streams = reference.random_streams(seed)
            want = reference.loss(streams, *([s.logprobs for s in streams],) * 2, config)
            slope = reference.gradient(streams, config)
            parts = reference.packed(streams, ROW, 1)
            total, denominator, gradients, sums = summed(objective, parts)
            alone = [summed(objective, reference.packed([s], ROW, 1)) for s in streams]
            np.testing.assert_allclose((total, denominator), want, rtol=1e-7)
            np.testing.assert_allclose(np.sum([a[:2] for a in alone], axis=0), want, rtol=1e-7)
            together = unpack(gradients, [len(s.mask) for s in streams], ROW)
            for got, one, expected in zip(together, alone, slope, strict=True):
                np.testing.assert_allclose(got, expected, atol=2e-9)
                np.testing.assert_allclose(one[2][0][0, : len(expected)], expected, atol=2e-9)
            acted += sums["clipped"]
        for bad in (np.nan, np.inf, -np.inf, 1e9):
            other = summed(objective, [spoil(*part, bad) for part in parts])
            assert other[:2] == (total, denominator) and np.array_equal(gradients, other[2]) and other[3] == sums
    assert acted  # the clip is part of what was compared


def spoil(logprobs, entropies, batch, bad):
    mask = np.asarray(batch.loss_mask)

    def put(values):
        return np.where(mask, values, bad)

    names = ("weights", *reference.STREAMS)
    return put(logprobs), put(entropies), replace(batch, **{n: put(getattr(batch, n)) for n in names})


@cache
def bounds(name, **more):
    """An objective with wide clips, whatever its name allows."""
    return policy_objective(objective=name, clip_low=0.2, clip_high=0.28, aggregation="seq_mean_token_mean", **more)


def test_token_form_of_gspo():
    """With one advantage a sequence its loss and gradient are those of GSPO; else each token has its own advantage."""
    with jax.enable_x64(True):
        for more in ({}, {"dual_clip": 1.1, "correction": "truncate", "correction_high": 1.1}):
            for constant in (True, False):
                parts = reference.packed(reference.random_streams(2, constant=constant), ROW, 1)
                plain, token = (summed(bounds(n, **more), parts) for n in ("gspo", "gspo_token"))
                assert np.allclose(plain[2], token[2], rtol=0, atol=1e-12) is constant
                assert (plain[0] == pytest.approx(token[0], rel=1e-12)) is constant


def test_gspo_token_credits_turns():
    """Advantages that differ between turns reach the gradient of their own tokens, at the ratio of the sequence."""
    with jax.enable_x64(True):
        (stream,) = reference.random_streams(3, lengths=(12,), spread=0.01)
        stream.mask[:] = np.arange(12) > 1
        stream.advantages = np.where(np.arange(12) < 6, 2.0, -0.5)
        (gradient,) = summed(bounds("gspo_token"), reference.packed([stream], ROW, 1))[2]
        s = np.exp(np.mean((stream.logprobs - stream.old_logprobs)[2:]))
        np.testing.assert_allclose(gradient[0, 2:12], -stream.weight * s * stream.advantages[2:] / 10, rtol=1e-12)


def test_all_objectives_agree_on_policy():
    """Before any update every ratio is 1 and every gradient is that of -A log pi; KL terms are 0 and pull nowhere.

    Case 4 of trainer: KL at step 0 is 0, whatever the estimator.
    """
    with jax.enable_x64(True):
        streams = reference.random_streams(4, constant=True)
        for s in streams:
            s.logprobs = s.behaviour_logprobs = s.reference_logprobs = s.old_logprobs
        parts = reference.packed(streams, ROW, 1)
        gradients = [-s.advantages * s.weight * s.mask / s.mask.sum() for s in streams]
        for name, estimator in [("grpo", "k1"), ("gspo", "k2"), ("gspo_token", "k3"), ("cispo", "k1")]:
            objective = bounds(name, kl_coefficient=0.7, kl_estimator=estimator, correction="truncate")
            got = unpack(summed(objective, parts)[2], [len(s.mask) for s in streams], ROW)
            np.testing.assert_allclose(np.concatenate(got), np.concatenate(gradients), atol=1e-12)
            sums = summed(objective, parts)[3]
            assert sums["reference_kl"] == 0 and sums["clipped"] == 0


def test_one_token_is_a_sequence():
    """Case 5 of trainer, clip-higher, for the objectives with a ratio: A = 1, r = 1.5 is -1.28; A = -1, r = 0.7 is 0.8.

    On sequences of one trained token the ratio of the sequence is the token's.
    """
    rows = reference.random_streams(0, lengths=(2, 2, 2))
    for s, ratio, advantage in zip(rows, (1.5, 0.7, 1.1), (1.0, -1.0, 1.0), strict=True):
        s.mask[:] = [False, True]
        s.logprobs, s.advantages, s.weight = s.old_logprobs + np.log(ratio), np.full(2, advantage), 1.0
    with jax.enable_x64(True):
        for name in ("grpo", "gspo", "gspo_token"):
            total, denominator = summed(bounds(name), reference.packed(rows, ROW, 1))[:2]
            assert total == pytest.approx(-1.28 + 0.8 - 1.1, rel=1e-12) and denominator == 3


def test_dual_clip_bounds_what_became_likelier_and_bad():
    """c = 3 (arXiv 1912.09729): the loss of A < 0 ends at 3 |A|, without gradient beyond; A > 0 is not touched."""
    ratios, advantages = jnp.array([5.0, 2.0, 5.0, 0.5]), jnp.array([-2.0, -2.0, 2.0, -2.0])

    def loss(log_ratio):
        losses, clipped = clipped_surrogate(log_ratio, advantages, 0.2, 0.28, 3.0)
        return losses.sum(), (losses, clipped)

    gradient, (losses, clipped) = jax.grad(loss, has_aux=True)(jnp.log(ratios))
    np.testing.assert_allclose(losses, [6.0, 4.0, -2.56, 1.6], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.0, 4.0, 0.0, 0.0], rtol=1e-6)
    assert clipped.tolist() == [True, False, True, True]


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """Its gradient is -A times the clipped ratio, at every token; the surrogate of GRPO has none where it clips."""
    streams = reference.random_streams(5, lengths=(3,))
    (s,) = streams
    s.mask[:], s.weight = [False, True, True], 1.0
    s.logprobs, s.advantages = s.old_logprobs + np.log([1.0, 2.0, 1.1]), np.array([1.0, 1.0, -1.0])
    with jax.enable_x64(True):
        parts = reference.packed(streams, ROW, 1)
        cispo, grpo = (summed(bounds(name), parts)[2][0][0, :3] for name in ("cispo", "grpo"))
    np.testing.assert_allclose(cispo, [0.0, -1.28 / 2, 1.1 / 2], rtol=1e-12)
    np.testing.assert_allclose(grpo, [0.0, 0.0, 1.1 / 2], rtol=1e-12)


def test_gradients_of_kl_estimators():
    """Expectation over all tokens of a small vocabulary: which divergence's gradient each loss has, and its value."""
    rng = np.random.default_rng(0)
    logits, reference_logits, behaviour_logits = (jnp.asarray(rng.normal(size=6)) for _ in range(3))

    def policy(logits):
        return jax.nn.log_softmax(logits)

    def divergence(p, q):
        return jnp.sum(jnp.exp(p) * (p - q))

    with jax.enable_x64(True):
        ref, behaviour = policy(reference_logits), policy(behaviour_logits)
        old = policy(logits)
        reverse = jax.grad(lambda x: divergence(policy(x), ref))(logits)
        forward = jax.grad(lambda x: divergence(ref, policy(x)))(logits)

        def expected(estimator, drawn):
            return jax.grad(lambda x: jnp.sum(jnp.exp(drawn) * kl_loss(estimator, policy(x), drawn, ref)[0]))(logits)

        np.testing.assert_allclose(expected("k1", old), reverse, atol=1e-7)
        np.testing.assert_allclose(expected("k1", behaviour), reverse, atol=1e-7)  # off-policy, too
        np.testing.assert_allclose(expected("k2", old), reverse, atol=1e-7)
        np.testing.assert_allclose(expected("k3", old), forward, atol=1e-7)
        assert np.abs(reverse - forward).max() > 0.05
        for estimator in ("k1", "k3"):
            value = jnp.sum(jnp.exp(old) * KL_ESTIMATORS[estimator](old, ref))
            assert value == pytest.approx(float(divergence(old, ref)), rel=1e-6)
