"""Group advantages and the way from trajectories to sequences."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import ConfigError, GRPOConfig
from trace_jax.learner.advantages import group_advantages
from trace_jax.learner.credit import grpo_sequences, sft_sequence
from trace_jax.rollout.trajectory import Trajectory


def test_baseline_counts_every_episode_once():
    """Case 6 of trainer: rows come per turn, out of order, mixed with another task."""
    turns = [("X", 0, 1.0)] * 4 + [("X", s, 0.0) for s in (1, 2, 3)]
    other = [("Y", s, r) for s, r in enumerate([1.0, 1.0, 0.0])]
    expected = {("X", 0): 0.75, ("X", 1): -0.25, ("X", 2): -0.25, ("X", 3): -0.25}
    rng = np.random.default_rng(0)
    for rows in (turns, turns[::-1], turns + other, [(turns + other)[i] for i in rng.permutation(10)]):
        groups, samples, rewards = zip(*rows, strict=True)
        got = group_advantages(rewards, groups, samples, divide_std=False)
        for group, sample, value in zip(groups, samples, got.values, strict=True):
            if group == "X":
                assert value == expected[group, sample]


def test_crashed_episode_leaves_its_group():
    """Case 6 of trainer: baseline over the survivors; a group of one survivor is dropped; both are counted."""
    got = group_advantages(
        [1.0, 0.0, 0.0, float("nan")], ["X"] * 4, crashed=[False, False, False, True], divide_std=False
    )
    np.testing.assert_allclose(got.values, [2 / 3, -1 / 3, -1 / 3, 0.0], rtol=1e-6)
    assert got.kept.tolist() == [True, True, True, False]
    assert got.metrics["crashed_episodes"] == 1
    got = group_advantages([1.0, 0.0], ["X", "X"], crashed=[False, True])
    assert not got.kept.any() and got.metrics["dropped_groups"] == 1
    assert np.array_equal(got.values, [0.0, 0.0])


def test_population_deviation_and_constant_groups():
    """Case 6 of trainer: ddof 0 gives 0.5 on [1, 0, 1, 0], so advantages are +-1; constant groups give exactly 0."""
    assert group_advantages([1, 0, 1, 0], [7] * 4).values.tolist() == [1.0, -1.0, 1.0, -1.0]
    for reward in (0.1, 0.65 + 0.05, 1 / 3):
        got = group_advantages([reward] * 7, [0] * 7)
        assert np.array_equal(got.values, np.zeros(7)) and got.kept.all()
        assert got.metrics["constant_groups"] == 1.0
        assert not group_advantages([reward] * 7, [0] * 7, drop_constant=True).kept.any()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=20), st.randoms())
def test_order_of_arrival_does_not_matter(rows, random):
    keyed = [(g, i, r) for i, (g, r) in enumerate(rows)]
    mixed = keyed[:]
    random.shuffle(mixed)

    def by_sample(rows):
        groups, samples, rewards = zip(*rows, strict=True)
        got = group_advantages(rewards, groups, samples)
        return {s: (v, k) for s, v, k in zip(samples, got.values.tolist(), got.kept.tolist(), strict=True)}

    assert by_sample(keyed) == by_sample(mixed)


def test_one_episode_with_two_rewards_is_a_bug():
    with pytest.raises(ValueError, match="two rewards"):
        group_advantages([1.0, 0.5], [0, 0], [0, 0])


def trajectory(group, sample, reward, status="finished", length=6):
    mask = np.zeros(length, bool)
    mask[2:] = True
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    return Trajectory(
        ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        turn_index=np.where(mask, 0, -1).astype(np.int32),
        versions=(0,),
        status=status,
        task_index=group,
        group=group,
        sample=sample,
        reward=reward,
    )


def test_sequences_of_a_batch():
    batch = [trajectory(0, i, r) for i, r in enumerate([1.0, 0.0, 0.0, 0.0])]
    batch += [trajectory(1, i, 0.5) for i in range(4)]
    sequences, left_out, metrics = grpo_sequences(batch, GRPOConfig(advantage_std=False))
    assert [s.advantages for s in sequences] == [0.75, -0.25, -0.25, -0.25]
    assert left_out == 16 and metrics["computed_episodes"] == 0.5 and metrics["constant_groups"] == 0.5
    # a KL term gives constant groups a gradient: they are computed
    sequences, left_out, _ = grpo_sequences(batch, GRPOConfig(kl_coefficient=0.01))
    assert len(sequences) == 8 and left_out == 0
    # DAPO drops them from numerator and denominator
    sequences, left_out, _ = grpo_sequences(batch, GRPOConfig(objective="dapo"))
    assert len(sequences) == 4 and left_out == 0
    _, left_out, _ = grpo_sequences(batch, GRPOConfig(aggregation="seq_mean_token_mean"))
    assert left_out == 4
    demonstration = sft_sequence(batch[0])
    assert demonstration.loss_mask is batch[0].loss_mask and demonstration.weight == 1.0


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


def test_greedy_trajectories_are_refused():
    """Case 4 of trainer: a greedy rollout has no behaviour distribution."""
    greedy = [trajectory(0, i, float(i)) for i in range(2)]
    for t, i in itertools.product(greedy, range(2, 6)):
        t.logprobs[i] = np.nan
    with pytest.raises(ConfigError, match="greedily"):
        grpo_sequences(greedy, GRPOConfig())
