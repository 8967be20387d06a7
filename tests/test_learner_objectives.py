"""Objectives and aggregations against NumPy, with the numbers of the cases."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import GRPOConfig
from trace_jax.learner.aggregation import AGGREGATIONS, aggregate
from trace_jax.learner.divergence import k3
from trace_jax.learner.objectives import grpo_objective, policy_objective, sft_objective
from trace_jax.learner.packing import Sequence, pack
from trace_jax.learner.surrogates import clipped_surrogate


def two_rows(rows=2):
    """Masks of 1 and 3 tokens, losses 4 and 1 1 1."""
    sequences = [
        Sequence(np.arange(4), np.array([False, True, False, False])),
        Sequence(np.arange(4), np.array([False, True, True, True])),
    ]
    return pack(sequences, 4, rows)


def case_losses(batch):
    """4 on sequences with one trained token, 1 elsewhere: whatever the row order."""
    return jnp.where(batch.loss_mask.sum(1, keepdims=True) == 1, 4.0, 1.0)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", 1.75), ("seq_mean_token_mean", 2.5), ("seq_sum_constant", 0.875), ("seq_mean_token_sum", 3.5)],
)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_normalisation_is_global(aggregation, expected, rows):
    """Case 5 of trainer: micro-batches of 2, 1 + 1, and with padding rows give one value."""
    parts = [aggregate(case_losses(b), b, aggregation, 4.0) for b in two_rows(rows)]
    assert sum(s for s, _ in parts) / sum(d for _, d in parts) == pytest.approx(expected, rel=1e-6)


def test_filtered_row_leaves_numerator_and_denominator():
    """Case 5 of trainer: with the overlong row filtered the token mean is 4, not 4/4."""
    (batch,) = two_rows()
    keep = np.asarray(batch.loss_mask).sum(1, keepdims=True) == 1
    batch = replace(batch, loss_mask=batch.loss_mask & keep)
    for aggregation, expected in [
        ("token_mean", 4.0),
        ("seq_mean_token_mean", 4.0),
        ("seq_mean_token_sum", 4.0),
        ("seq_sum_constant", 1.0),
    ]:
        total, denominator = aggregate(jnp.full((2, 4), 4.0), batch, aggregation, 4.0)
        assert total / denominator == expected


def test_packed_sequences_are_told_apart():
    """The sequence means of two sequences in one row are those of two rows."""
    a = Sequence(np.arange(4), np.array([False, True, False, False]), weight=2.0)
    b = Sequence(np.arange(4), np.array([False, True, True, True]))
    for length in (4, 8, 11):
        (batch,) = pack([a, b], length, 4 if length == 4 else 2)
        losses = jnp.where(batch.weights == 2.0, 4.0, 1.0)
        total, denominator = aggregate(losses, batch, "seq_mean_token_mean")
        assert total == pytest.approx(2 * 4 + 1) and denominator == pytest.approx(3)


def test_clip_higher():
    """Case 5 of trainer: A = +1 at ratio 1.5 gives -1.28, A = -1 at ratio 0.7 gives +0.8."""
    losses, clipped = clipped_surrogate(jnp.log(jnp.array([[1.5, 0.7, 1.1]])), jnp.array([[1.0, -1.0, 1.0]]), 0.2, 0.28)
    np.testing.assert_allclose(losses, [[-1.28, 0.8, -1.1]], rtol=1e-6)
    assert clipped.tolist() == [[True, True, False]]


def random_batch(seed=0, rows=3, time=24):
    rng = np.random.default_rng(seed)
    sequences = []
    for n in (9, 14, 5, 20, 7):
        mask = rng.random(n) < 0.6
        mask[0], mask[1] = False, True
        sequences.append(Sequence(rng.integers(1, 50, n), mask, rng.normal(size=n), -rng.random(n), 1.0 + rng.random()))
    (batch,) = pack(sequences, time, rows)
    batch = replace(batch, reference_logprobs=-rng.random((rows, time)).astype(np.float32))
    logprobs = -rng.random((rows, time)).astype(np.float32)
    return batch, logprobs, rng.random((rows, time)).astype(np.float32)


def numpy_policy_loss(logprobs, entropies, batch, cfg):
    """One sequence at a time, in float64, straight from the formulas of section 4."""
    total = denominator = 0.0
    for row in range(len(batch.ids)):
        for segment in range(1, int(batch.segments[row].max()) + 1):
            at = (np.asarray(batch.segments[row]) == segment) & np.asarray(batch.loss_mask[row])
            if not at.any():
                continue
            lp, a = logprobs[row][at].astype(float), batch.advantages[row][at].astype(float)
            ratio = np.exp(lp - batch.old_logprobs[row][at])
            loss = -np.minimum(ratio * a, np.clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high) * a)
            x = batch.reference_logprobs[row][at] - lp
            loss += cfg.kl_coefficient * (np.exp(x) - 1 - x) - cfg.entropy_coefficient * entropies[row][at]
            w = float(batch.weights[row][at][0])
            total += (
                w
                * {
                    "token_mean": loss.sum(),
                    "seq_mean_token_mean": loss.mean(),
                    "seq_mean_token_sum": loss.sum(),
                    "seq_sum_constant": loss.sum() / cfg.aggregation_constant,
                }[cfg.aggregation]
            )
            denominator += w * (at.sum() if cfg.aggregation == "token_mean" else 1)
    return total / denominator


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("extra", [{}, {"kl_coefficient": 0.3, "entropy_coefficient": 0.1}])
def test_against_numpy(aggregation, extra):
    constant = {"aggregation_constant": 32.0} if aggregation == "seq_sum_constant" else {}
    cfg = GRPOConfig(aggregation=aggregation, **constant, **extra)
    batch, logprobs, entropies = random_batch()
    total, denominator, sums = grpo_objective(cfg)(logprobs, entropies, batch)
    assert total / denominator == pytest.approx(numpy_policy_loss(logprobs, entropies, batch, cfg), rel=1e-5)
    ratio = np.exp(logprobs - batch.old_logprobs)[batch.loss_mask]
    assert sums["ratio_max"] == pytest.approx(ratio.max(), rel=1e-5)
    assert sums["ratio"] == pytest.approx(ratio.sum(), rel=1e-5)
    assert sums["tokens"] == batch.loss_mask.sum()


def test_presets_give_their_formulas():
    batch, logprobs, entropies = random_batch(1)
    dr = GRPOConfig(objective="dr_grpo", advantage_std=False, aggregation="seq_sum_constant", aggregation_constant=64.0)
    for cfg in (dr, GRPOConfig(objective="dapo", constant_groups="drop"), GRPOConfig()):
        total, denominator, _ = grpo_objective(cfg)(logprobs, entropies, batch)
        assert total / denominator == pytest.approx(numpy_policy_loss(logprobs, entropies, batch, cfg), rel=1e-5)


@pytest.mark.parametrize("bad", [1e9, np.nan, np.inf])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_positions_have_no_effect(bad, aggregation):
    """Case 1(v) of trainer: loss and gradient are bitwise the same whatever stands on masked tokens."""
    batch, logprobs, entropies = random_batch()
    objective = policy_objective(
        clip_low=0.2, clip_high=0.28, aggregation=aggregation, kl_coefficient=0.1, entropy_coefficient=0.1
    )
    mask = np.asarray(batch.loss_mask)
    names = ("advantages", "old_logprobs", "weights", "reference_logprobs")
    spoiled = replace(batch, **{n: np.where(mask, getattr(batch, n), bad).astype(np.float32) for n in names})

    def loss(logprobs, batch, entropies):
        total, denominator, _ = objective(logprobs, entropies, batch)
        return total / denominator

    value, grad = jax.value_and_grad(loss)(logprobs, batch, entropies)
    value2, grad2 = jax.value_and_grad(loss)(
        np.where(mask, logprobs, bad).astype(np.float32), spoiled, np.where(mask, entropies, bad).astype(np.float32)
    )
    assert value == value2 and np.array_equal(grad, grad2)
    assert np.all(np.asarray(grad)[~mask] == 0)


def test_sft_masks_come_from_lengths():
    """Case 2 of trainer: id 0 is a token like any other, inside a prompt or as a real end; padding is where none is."""
    mask = np.array([False, False, True, True, True])
    a, b = Sequence(np.array([0, 3, 5, 6, 0]), mask), Sequence(np.array([0, 3, 5, 6, 7]), mask)
    (batch,) = pack([a, b], 6, 2)
    assert batch.loss_mask.tolist() == [[False, False, True, True, True, False]] * 2
    assert (batch.segments > 0).tolist() == [[True] * 5 + [False]] * 2
    logprobs = -jnp.arange(12.0).reshape(2, 6)
    total, denominator, sums = sft_objective()(logprobs, jnp.zeros((2, 6)), batch)
    assert total == 2 + 3 + 4 + 8 + 9 + 10 and denominator == 6 and sums["filled"] == 10


def test_policy_gradient_at_ratio_one():
    """On-policy the gradient of the surrogate is that of -A log pi, and k3 has zero gradient against itself."""
    batch, _, entropies = random_batch()
    batch = replace(batch, reference_logprobs=batch.old_logprobs)
    objective = policy_objective(clip_low=0.2, clip_high=0.28, aggregation="token_mean", kl_coefficient=0.5)
    grad = jax.grad(lambda lp: objective(lp, entropies, batch)[0])(jnp.asarray(batch.old_logprobs))
    expected = np.where(batch.loss_mask, -batch.advantages * batch.weights, 0.0)
    np.testing.assert_allclose(grad, expected, atol=1e-6)
    assert k3(jnp.array(-1.0), jnp.array(-1.0)) == 0
