"""Group advantages."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.learner.advantages import group_advantages


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


def brute_force(rows, divide_std, baseline, drop_constant, lost_members, members):
    """(advantage, kept) of each row (group, sample, reward, crashed), from its definition, in rationals."""
    answer = []
    for group, sample, reward, _ in rows:
        episodes = {s for g, s, _, _ in rows if g == group}
        dead = {s for g, s, _, c in rows if g == group and c}
        survivors = {s: Fraction(r) for g, s, r, _ in rows if g == group and s not in dead}
        lost = dead or (members is not None and len(episodes) < members)
        constant = len(set(survivors.values())) < 2
        if sample in dead or len(survivors) < 2 or (lost and lost_members == "drop_group"):
            answer.append((0.0, False))
        elif constant:
            answer.append((0.0, not drop_constant))
        else:
            over = [r for s, r in survivors.items() if baseline == "mean" or s != sample]
            mean = sum(survivors.values()) / len(survivors)
            deviation = math.sqrt(sum((r - mean) ** 2 for r in survivors.values()) / len(survivors))
            advantage = float(Fraction(reward) - sum(over) / len(over))
            answer.append((advantage / deviation if divide_std else advantage, True))
    return answer


@st.composite
def deliveries(draw):
    """Rows of a few groups, some per turn, out of order; some episodes crashed, which only one of their rows says."""
    rows, size = [], draw(st.integers(1, 5))
    for group in range(draw(st.integers(1, 4))):
        for sample in range(draw(st.integers(1, size))):
            reward = draw(st.sampled_from([0.0, 0.05, 0.375, 0.7, 1.0]) | st.integers(0, 1000).map(lambda n: n / 1000))
            turns, crashed = draw(st.integers(1, 3)), draw(st.integers(0, 4)) == 0
            rows += [(f"task {group}", sample, reward, crashed and turn == 0) for turn in range(turns)]
    return draw(st.permutations(rows)), size


@settings(max_examples=150, deadline=None)
@given(
    deliveries(),
    st.booleans(),
    st.sampled_from(["mean", "leave_one_out"]),
    st.booleans(),
    st.sampled_from(["survivors", "drop_group"]),
    st.booleans(),
)
def test_equal_to_the_definition(delivery, divide_std, baseline, drop_constant, lost_members, sized):
    """Case 6 of trainer, generally: against rational arithmetic from the definition, for every declared policy."""
    rows, size = delivery
    members = size if sized else None
    groups, samples, rewards, crashed = zip(*rows, strict=True)
    got = group_advantages(
        rewards, groups, samples, divide_std=divide_std, baseline=baseline, drop_constant=drop_constant,
        lost_members=lost_members, members=members, crashed=crashed,
    )  # fmt: skip
    expected = brute_force(rows, divide_std, baseline, drop_constant, lost_members, members)
    np.testing.assert_allclose(got.values, [v for v, _ in expected], rtol=1e-6, atol=1e-9)
    assert got.kept.tolist() == [k for _, k in expected]
    episodes = {(g, s) for g, s, _, _ in rows}
    dead = {(g, s) for g, s, _, c in rows if c}
    assert got.metrics["episodes"] == len(episodes) and got.metrics["crashed_episodes"] == len(dead)
    assert got.metrics["missing_episodes"] == (len(set(groups)) * size - len(episodes) if sized else 0)
    kept_all = brute_force(rows, divide_std, baseline, False, lost_members, members)
    alive = {g for g, (_, k) in zip(groups, kept_all, strict=True) if k}
    assert got.metrics["groups"] - got.metrics["dropped_groups"] == len(alive)
    varied = {g for g, (v, _) in zip(groups, kept_all, strict=True) if v}
    assert got.metrics["constant_groups"] == pytest.approx(1 - len(varied) / len(alive) if alive else 0.0)
    survivors = {(g, s): r for g, s, r, _ in rows if g in alive and (g, s) not in dead}
    assert got.metrics["reward_mean"] == pytest.approx(np.mean(list(survivors.values())) if survivors else 0.0)


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


def test_declared_policy_for_lost_members():
    """Case 6 of trainer: the group of a crashed episode, or of one that never came, can be left out as a whole."""
    crashed = [False, False, False, True] + [False] * 4
    rewards, groups = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], ["X"] * 4 + ["Y"] * 4
    got = group_advantages(rewards, groups, crashed=crashed, divide_std=False, lost_members="drop_group")
    assert got.values.tolist() == [0.0] * 4 + [0.75, -0.25, -0.25, -0.25]
    assert got.kept.tolist() == [False] * 4 + [True] * 4 and got.metrics["dropped_groups"] == 1
    got = group_advantages(rewards[1:], groups[1:], members=4, lost_members="drop_group")
    assert got.kept.tolist() == [False] * 3 + [True] * 4 and got.metrics["missing_episodes"] == 1
    with pytest.raises(ValueError, match="4 episodes instead of 3"):
        group_advantages(rewards, groups, members=3)
    with pytest.raises(ValueError, match="lost_members"):
        group_advantages(rewards, groups, lost_members="ignore")


def test_leave_one_out():
    """The baseline of an episode is the mean of the others: 0 for the 1 of [1, 0, 0, 0], 1/3 for its zeros. The
    deviation is the whole group's with either baseline."""
    got = group_advantages([1, 0, 0, 0], [7] * 4, divide_std=False, baseline="leave_one_out").values
    np.testing.assert_allclose(got, [1.0, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    got = group_advantages([1, 0, 1, 0], [7] * 4, baseline="leave_one_out").values
    np.testing.assert_allclose(got, np.array([1, -1, 1, -1]) * 4 / 3, rtol=1e-6)
    assert np.array_equal(group_advantages([1 / 3] * 7, [0] * 7, baseline="leave_one_out").values, np.zeros(7))


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
