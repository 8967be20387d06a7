"""From trajectories to sequences: penalties, filters, and the denominator of what is not computed."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import ConfigError, GRPOConfig
from trace_jax.learner.aggregation import AGGREGATIONS, aggregate
from trace_jax.learner.credit import denominator, grpo_sequences, overlong_penalty, sft_sequence, validate
from trace_jax.learner.packing import Sequence, pack
from trace_jax.rollout.trajectory import Trajectory

FOUR = GRPOConfig(group=4, advantage_std=False)


def trajectory(group, sample, reward, status="finished", length=6, prompt=2):
    mask = np.arange(length) >= prompt
    return Trajectory(
        ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        turn_index=np.where(mask, 0, -1).astype(np.int32),
        versions=(0,),
        status=status,
        task_index=group,
        group=group,
        sample=sample,
        reward=reward,
    )


def mixed_batch():
    """A group with spread and one without."""
    return [trajectory(0, i, r) for i, r in enumerate([1.0, 0.0, 0.0, 0.0])] + [trajectory(1, i, 0.5) for i in range(4)]


def test_sequences_of_a_batch():
    batch = mixed_batch()
    sequences, left_out, metrics = grpo_sequences(batch, FOUR)
    assert [s.advantages for s in sequences] == [0.75, -0.25, -0.25, -0.25]
    assert left_out == 16 and metrics["computed_episodes"] == 0.5 and metrics["constant_groups"] == 0.5
    # a KL term gives constant groups a gradient, and a mask may take some of their tokens out: they are computed
    for change in ({"kl_coefficient": 0.01}, {"correction": "mask_tokens"}, {"correction": "mask_sequences"}):
        sequences, left_out, _ = grpo_sequences(batch, replace(FOUR, **change))
        assert len(sequences) == 8 and left_out == 0
    assert grpo_sequences(batch, replace(FOUR, correction="truncate"))[1] == 16
    # dynamic sampling drops them from numerator and denominator; so does what resampling did not replace
    for policy in ("drop", "resample"):
        for coefficient in (0.0, 0.01):
            config = replace(FOUR, constant_groups=policy, kl_coefficient=coefficient)
            sequences, left_out, _ = grpo_sequences(batch, config)
            assert len(sequences) == 4 and left_out == 0
    demonstration = sft_sequence(batch[0])
    assert demonstration.loss_mask is batch[0].loss_mask and demonstration.weight == 1.0


def test_options_reach_the_advantages():
    """Every field of the configuration that is about groups changes what is trained on."""
    batch = [trajectory(0, i, r) for i, r in enumerate([1.0, 0.0, 1.0, 0.0])]
    crashed = [*batch[:3], trajectory(0, 3, 0.0, "timed_out")]

    def advantages(trajectories, **changes):
        return [s.advantages for s in grpo_sequences(trajectories, replace(FOUR, **changes))[0]]

    assert advantages(batch) == [0.5, -0.5, 0.5, -0.5]
    assert advantages(batch, advantage_std=True) == [1.0, -1.0, 1.0, -1.0]
    assert advantages(batch, baseline="leave_one_out") == pytest.approx([2 / 3, -2 / 3, 2 / 3, -2 / 3])
    assert advantages(crashed) == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert advantages(crashed, lost_members="drop_group") == advantages(batch[:3], lost_members="drop_group") == []


def test_turn_credit_keeps_constant_groups():
    """Tokens with advantages of their own: constant groups are trained on, with an outcome advantage of 0."""
    batch = mixed_batch()
    seen = []

    def credit(t, outcome):
        seen.append(outcome)
        return outcome + 0.2 * np.arange(6) * (t.sample != 3)

    config = replace(FOUR, constant_groups="resample")
    sequences, left_out, _ = grpo_sequences(batch, config, token_advantages=credit)
    assert seen == [0.75, -0.25, -0.25, -0.25, 0.0, 0.0, 0.0, 0.0]
    # all but the last of the constant group, whose tokens all got 0: it counts in the mean
    assert len(sequences) == 7 and left_out == 4
    np.testing.assert_allclose(sequences[4].advantages, 0.2 * np.arange(6))


def test_truncated_and_crashed_trajectories():
    """Case 2 of trainer: exact truncated share; the overlong filter drops the loss, not the reward in the baseline."""
    batch = [trajectory(0, 0, 1.0), trajectory(0, 1, 0.0, "truncated")]
    sequences, _, metrics = grpo_sequences(batch, GRPOConfig())
    assert metrics["truncated"] == 0.5 and [s.advantages for s in sequences] == [1.0, -1.0]
    sequences, left_out, _ = grpo_sequences(batch, GRPOConfig(mask_truncated=True))
    assert [s.advantages for s in sequences] == [1.0] and left_out == 0
    for status in ("tool_failure", "timed_out"):
        sequences, _, metrics = grpo_sequences([*batch, trajectory(0, 2, 0.0, status)], GRPOConfig())
        assert len(sequences) == 2 and metrics["crashed_episodes"] == 1


def total(sequences, left_out, aggregation, loss=lambda b: -b.advantages):
    """Mean loss of the trained tokens, by default that of the surrogate before any update; L = 4 of Dr.GRPO."""
    sums = [aggregate(jnp.asarray(loss(b)), b, aggregation, 4.0) for b in pack(sequences, 16, 2)]
    return sum(float(s) for s, _ in sums) / (sum(float(d) for _, d in sums) + left_out)


def test_filtered_trajectory_leaves_numerator_and_denominator():
    """Case 5 of trainer: losses 4 and 1 1 1; with the second trajectory truncated and filtered the token mean is 4.0,
    not 4/4. The same where the filtered one carries no gradient, which has a denominator of its own."""
    config = replace(FOUR, aggregation_constant=4.0)
    losses = {0: 4.0, 1: 1.0}
    for aggregation, both in [("token_mean", 1.75), ("seq_mean_token_mean", 2.5), ("seq_sum_constant", 0.875)]:
        for filtered, expected in [(False, both), (True, 1.0 if aggregation == "seq_sum_constant" else 4.0)]:
            rows = [trajectory(0, 0, 1.0, length=4, prompt=3), trajectory(0, 1, 0.0, "truncated", length=4, prompt=1)]
            setting = replace(config, aggregation=aggregation, mask_truncated=filtered)
            sequences, left_out, _ = grpo_sequences(
                rows, setting, token_advantages=lambda t, _: np.full(4, -losses[t.sample])
            )
            assert left_out == 0 and total(sequences, left_out, aggregation) == pytest.approx(expected, rel=1e-6)
    constant = [trajectory(0, i, 0.5, "truncated" if i == 3 else "finished") for i in range(4)]
    assert grpo_sequences(constant, FOUR)[1] == 16
    assert grpo_sequences(constant, replace(FOUR, mask_truncated=True))[1] == 12


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_what_is_not_computed_counts_in_the_mean(aggregation):
    """The mean is that of all trajectories, though those without advantage are not computed; and what one sequence adds
    to a denominator is what `aggregate` says, with weights and without a trained token."""
    rewards = np.random.default_rng(3).integers(0, 2, (3, 4)).astype(float)
    batch = [trajectory(g, i, r, length=4 + i + g) for g, row in enumerate(rewards) for i, r in enumerate(row.tolist())]
    batch += [trajectory(3, i, 0.5, length=5 + i) for i in range(4)]
    config = replace(FOUR, aggregation=aggregation)
    sequences, left_out, _ = grpo_sequences(batch, config)
    everything, nothing, _ = grpo_sequences(batch, replace(config, entropy_coefficient=1e-9))
    assert 0 < len(sequences) < len(everything) == 16 and left_out > 0 and nothing == 0
    whole = total(everything, 0.0, aggregation, lambda b: b.advantages**2)
    assert whole > 0 and total(sequences, left_out, aggregation, lambda b: b.advantages**2) == pytest.approx(whole)
    for trained, weight in itertools.product((0, 1, 5), (0.0, 1.0, 2.5)):
        sequence = Sequence(np.arange(7), np.arange(7) >= 7 - trained, weight=weight)
        (packed,) = pack([sequence], 8, 1)
        assert denominator(sequence, aggregation) == float(aggregate(jnp.ones((1, 8)), packed, aggregation)[1])


def test_overlong_penalty():
    """DAPO's soft overlong punishment in closed form, scaled: nothing up to the buffer, then linear, all of it at the
    limit and for whatever a limit cut off."""
    for length, truncated, expected in [
        (10, False, 0.0), (80, False, 0.0), (81, False, 0.025), (90, False, 0.25), (100, False, 0.5),
        (120, False, 0.5), (30, True, 0.5), (100, True, 0.5),
    ]:  # fmt: skip
        assert overlong_penalty(length, truncated, limit=100, buffer=20, penalty=0.5) == pytest.approx(expected)
        assert overlong_penalty(length, truncated, limit=100, buffer=0, penalty=0.5) == 0.0


def test_overlong_penalty_comes_before_the_groups_statistics():
    batch = [
        trajectory(0, 0, 1.0, length=80),
        trajectory(0, 1, 1.0, length=90),
        trajectory(0, 2, 0.0, "truncated", length=40),
        trajectory(0, 3, 0.0, "timed_out", length=100),
    ]
    config = replace(FOUR, overlong_buffer=20, overlong_penalty=0.5)
    sequences, _, metrics = grpo_sequences(batch, config, context=100)
    rewards = np.array([1.0, 0.75, -0.5])
    np.testing.assert_allclose([s.advantages for s in sequences], rewards - rewards.mean(), rtol=1e-6)
    assert metrics["overlong_penalty"] == 0.25 and metrics["overlong_share"] == pytest.approx(2 / 3)
    assert metrics["reward_mean"] == pytest.approx(rewards.mean())
    # the penalty gives a group of equal rewards spread: it is not constant any more
    equal = [trajectory(0, i, 1.0, length=80 + 10 * i) for i in range(2)]
    assert [s.advantages for s in grpo_sequences(equal, config, 100)[0]] == [0.125, -0.125]
    assert "overlong_penalty" not in grpo_sequences(equal, FOUR, 100)[2]
    with pytest.raises(ValueError, match="context"):
        grpo_sequences(batch, config)


def test_overlong_buffer_must_be_shorter_than_the_context():
    validate(GRPOConfig(overlong_buffer=99), 100)
    with pytest.raises(ConfigError, match="overlong_buffer` is 100.*lower"):
        validate(GRPOConfig(overlong_buffer=100), 100)


def test_greedy_trajectories_are_refused():
    """Case 4 of trainer: a greedy rollout has no behaviour distribution, with an advantage or without."""
    for rewards in ([0.0, 1.0], [1.0, 1.0]):
        greedy = [trajectory(0, i, r) for i, r in enumerate(rewards)]
        for t in greedy:
            t.logprobs[2:] = np.nan
        with pytest.raises(ConfigError, match="greedily"):
            grpo_sequences(greedy, GRPOConfig())
