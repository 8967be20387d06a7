"""Corrections of the gap between sampler and learner, and the metrics that measure it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import objective_reference as reference
import pytest

from trace_jax.config import ConfigError
from trace_jax.learner import metrics
from trace_jax.learner.corrections import correct, truncated
from trace_jax.learner.objectives import policy_objective

ROW = 60
BASE = dict(clip_low=0.2, clip_high=0.28, aggregation="seq_mean_token_mean")


def packed(seed=0, **changes):
    """One micro-batch of one row in float32."""
    ((logprobs, entropies, batch),) = reference.packed(reference.random_streams(seed, **changes), ROW, 1)
    return jax.tree.map(lambda a: a.astype(np.float32) if a.dtype == np.float64 else a, (logprobs, entropies, batch))


def test_truncated_weights():
    """Case 4 of trainer: min(exp(t - s), 2) on (0.5/0.1, 0.1/0.5, 0.9/0.9) is (2, 0.2, 1), and constant."""
    learner, sampler = jnp.log(jnp.array([0.5, 0.1, 0.9])), jnp.log(jnp.array([0.1, 0.5, 0.9]))
    np.testing.assert_allclose(truncated(learner - sampler, 2.0), [2.0, 0.2, 1.0], rtol=1e-6)
    assert not jax.grad(lambda x: truncated(x - sampler, 2.0).sum())(learner).any()


def test_truncation_multiplies_the_surrogate():
    """Case 4 of trainer, through the objective: three sequences of one token, ratio 1, A = 1: the loss is -(weights).

    The gradient with respect to the log-probs has the weights as constants; there is none through the old ones' weight.
    """
    streams = reference.random_streams(0, lengths=(2, 2, 2))
    for s, learner, sampler in zip(streams, (0.5, 0.1, 0.9), (0.1, 0.5, 0.9), strict=True):
        s.mask[:], s.advantages, s.weight = [False, True], np.ones(2), 1.0
        s.old_logprobs = s.logprobs = np.full(2, np.log(learner))
        s.behaviour_logprobs = np.full(2, np.log(sampler))
    ((logprobs, entropies, batch),) = reference.packed(streams, 6, 1)
    objective = policy_objective(**BASE, correction="truncate", correction_high=2.0)
    (total, denominator), gradient = jax.value_and_grad(
        lambda lp, behaviour: objective(lp, entropies, replace(batch, behaviour_logprobs=behaviour))[:2],
        argnums=(0, 1), has_aux=True,
    )(logprobs, batch.behaviour_logprobs)  # fmt: skip
    assert total == pytest.approx(-3.2, rel=1e-6) and denominator == 3
    np.testing.assert_allclose(gradient[0], [[0, -2.0, 0, -0.2, 0, -1.0]], rtol=1e-6)
    assert not gradient[1].any()


@pytest.mark.parametrize("correction", ["mask_tokens", "mask_sequences"])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_what_a_mask_removes_was_never_there(correction, name):
    """Case 5 of trainer: bit for bit as if `loss_mask` had been smaller, in numerator, denominator and every mean."""
    limits = (0.8, 1.25) if correction == "mask_tokens" else (0.9, 1.2)
    rest = dict(BASE, objective=name, kl_coefficient=0.1, entropy_coefficient=0.1)
    masked = policy_objective(**rest, correction=correction, correction_low=limits[0], correction_high=limits[1])
    logprobs, entropies, batch = packed()
    old, behaviour = batch.old_logprobs.astype(float), batch.behaviour_logprobs.astype(float)
    keep = np.array(batch.loss_mask)
    for i in range(1, 6):
        at = np.flatnonzero(batch.loss_mask[0] & (batch.segments[0] == i))
        weight = np.exp((old - behaviour)[0, at])
        weight = weight if correction == "mask_tokens" else np.full(len(at), np.prod(weight) ** (1 / len(at)))
        keep[0, at] = (limits[0] <= weight) & (weight <= limits[1])
    assert 0 < keep.sum() < batch.loss_mask.sum()
    got, want = (
        jax.value_and_grad(lambda lp, f=f, b=b: _flip(f(lp, entropies, b)), has_aux=True)(logprobs)
        for f, b in ((masked, batch), (policy_objective(**rest), replace(batch, loss_mask=keep)))
    )
    (total, (denominator, sums)), (total2, (denominator2, sums2)) = got[0], want[0]
    assert total == total2 and denominator == denominator2 and np.array_equal(got[1], want[1])
    same = {k for k in sums if not k.startswith("mismatch")}
    assert len(same) >= 10 and all(sums[k] == sums2[k] for k in same)
    # the gap between sampler and learner is that of all tokens, removed ones included
    assert sums["mismatch_tokens"] == batch.loss_mask.sum() and sums["tokens"] == keep.sum()
    weights = np.exp(old - behaviour)
    share = weights[keep].sum() / weights[batch.loss_mask].sum()
    assert metrics.finish(floats(sums), 0.0, 1.0)["mismatch_kept"] == pytest.approx(share, rel=1e-5)


def _flip(result):
    return result[0], result[1:]


def floats(sums):
    return {k: float(v) for k, v in sums.items()}


def test_masks_that_remove_everything_train_nothing():
    """Neither sum nor denominator nor gradient: `Learner.step` skips such an update."""
    logprobs, entropies, batch = packed()
    batch = replace(batch, behaviour_logprobs=batch.old_logprobs - 3.0)
    objective = policy_objective(**BASE, correction="mask_tokens")
    (total, (denominator, sums)), gradient = jax.value_and_grad(
        lambda lp: _flip(objective(lp, entropies, batch)), has_aux=True
    )(logprobs)
    assert total == 0 and denominator == 0 and not gradient.any()
    report = metrics.finish(floats(sums), 0.0, 0.0)
    assert report["mismatch_kept"] == 0 and report["tokens"] == 0 and np.isfinite(list(report.values())).all()


@pytest.mark.parametrize("mirrored", [False, True])
def test_mismatch_is_measured_by_default(mirrored):
    """Mean and largest log-ratio, kept share and effective sample size against NumPy, over any micro-batches."""
    objective = policy_objective(**BASE)
    streams = reference.random_streams(1)
    if mirrored:  # the largest of either sign
        for s in streams:
            s.behaviour_logprobs = 2 * s.logprobs - s.behaviour_logprobs
    gap = np.concatenate([(s.logprobs - s.behaviour_logprobs)[s.mask] for s in streams])
    weight = np.exp(gap)
    for groups in ([streams], [streams[:2], streams[2:]]):
        sums = {}
        for group in groups:
            for part in reference.packed(group, ROW, 1):
                new = floats(objective(*part)[2])
                sums = floats(metrics.combine(sums, new)) if sums else new
        report = metrics.finish(sums, 1.0, 1.0)
        assert report["mismatch_mean"] == pytest.approx(gap.mean(), rel=1e-5)
        assert report["mismatch_gap"] == pytest.approx(np.abs(gap).mean(), rel=1e-5)
        assert report["mismatch_max"] == pytest.approx(np.abs(gap).max(), rel=1e-5)
        assert report["mismatch_ess"] == pytest.approx(weight.sum() ** 2 / (len(gap) * (weight**2).sum()), rel=1e-5)
        assert report["mismatch_kept"] == 1.0
    assert set(metrics.MISMATCH) <= set(report) and all(metrics.MISMATCH.values())
    assert set(report) - metrics.OF_TRAINED_TOKENS == {"tokens", "filled_tokens", "padding_share"}


def test_mismatch_of_a_perfect_sampler():
    logprobs, entropies, batch = packed()
    sums = policy_objective(**BASE)(logprobs, entropies, replace(batch, behaviour_logprobs=logprobs))[2]
    report = metrics.finish(floats(sums), 0.0, 1.0)
    exact = {"mismatch_mean": 0.0, "mismatch_gap": 0.0, "mismatch_max": 0.0, "mismatch_kept": 1.0, "mismatch_ess": 1.0}
    assert {k: report[k] for k in metrics.MISMATCH} == exact


def test_kept_share_of_truncation():
    """By token for the ratio of a token, by sequence (geometric mean) for that of a sequence."""
    _, _, batch = packed(2)
    old, behaviour = batch.old_logprobs.astype(float), batch.behaviour_logprobs.astype(float)
    for by_sequence in (False, True):
        log_weight = old - behaviour
        if by_sequence:
            for i in range(1, 6):
                at = batch.segments == i
                log_weight[at] = log_weight[at & batch.loss_mask].mean()
        weight = np.exp(log_weight)[batch.loss_mask]
        _, factor, sums = correct(batch, "truncate", 0.0, 1.1, by_sequence)
        np.testing.assert_allclose(factor[batch.loss_mask], np.minimum(weight, 1.1), rtol=1e-5)
        kept, total = floats(sums).values()
        assert kept / total == pytest.approx(np.minimum(weight, 1.1).sum() / weight.sum(), rel=1e-5) and kept < total


def test_unknown_corrections_are_refused():
    with pytest.raises(ConfigError, match="mask_tokens"):
        correct(packed()[2], "mask", 0.5, 2.0)
