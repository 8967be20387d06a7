"""Acceptance of worlds and the search for their difficulty, against statistics counted by hand and a known policy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.capability.worlds import TRIES, Statistics, Try, Window, next_level
from trace_jax.config_rules import LEVELS

WINDOW = Window()


def statistics(reward=0.4, success=0.4, std=0.2, all_success=0.0, all_zero=0.0):
    return Statistics(reward, success, std, all_success, all_zero)


def test_statistics_are_those_of_the_groups():
    rewards = np.array([[0.0, 0.0], [1.0, 0.5], [0.25, 0.0], [1.0, 1.0]])
    found = Statistics.of(rewards, rewards >= 0.5)
    assert (found.reward, found.success, found.all_success, found.all_zero) == (3.75 / 8, 4 / 8, 2 / 4, 1 / 4)
    assert found.std == pytest.approx(np.sqrt(np.mean((rewards.ravel() - 3.75 / 8) ** 2)))


@pytest.mark.parametrize(
    "changed, fault, direction",
    [
        ({}, None, 0),
        ({"reward": 0.2, "success": 0.6, "std": 0.05, "all_success": 0.2, "all_zero": 0.2}, None, 0),  # the very edge
        ({"reward": 0.19}, "reward 0.19 below 0.2", -1),
        ({"success": 0.61}, "success 0.61 above 0.6", 1),
        ({"std": 0.04}, "std 0.040 below 0.05", 0),
        ({"all_success": 0.25}, "25% of groups all succeed", 1),
        ({"all_zero": 0.25}, "25% of groups earn nothing", -1),
        ({"success": 0.1, "reward": 0.7}, "reward 0.70 above 0.6", 0),  # no difficulty mends both
    ],
)
def test_the_window(changed, fault, direction):
    found = statistics(**changed)
    assert (fault in found.faults(WINDOW)) if fault else found.faults(WINDOW) == []
    assert found.direction(WINDOW) == direction
    tried = Try(1.5, found)
    assert Try.from_json(tried.as_json(WINDOW)) == tried and tried.as_json(WINDOW)["accepted"] == (fault is None)


@given(st.floats(-5, 5), st.floats(0.3, 2.0))
def test_the_search_finds_a_level_of_a_policy_whose_success_falls_with_it(middle, width):
    tried = []
    while (level := next_level(tried, WINDOW)) is not None:
        success = 1 / (1 + np.exp((level - middle) / width))
        tried.append(Try(level, statistics(reward=success, success=success)))
        assert abs(level) <= LEVELS and len(tried) <= TRIES
    levels = [t.level for t in tried]
    assert len(set(levels)) == len(levels)
    # success is within the window on a stretch of levels at least this wide: halving finds one of some size
    if width * (np.log(4) - np.log(2 / 3)) > 1.0 and abs(middle) < 4:
        assert tried[-1].accepted(WINDOW)


def test_an_infeasible_level_counts_as_too_hard_and_no_level_is_tried_twice():
    hard, easy = Try(2.0, None, "no episodes"), Try(0.0, statistics(success=0.9))
    assert Try.from_json(hard.as_json(WINDOW)) == hard
    assert next_level([easy], WINDOW) == 2.0 and next_level([easy, hard], WINDOW) == 1.0
    assert next_level([Try(0.0, statistics(std=0.0))], WINDOW) is None
    levels = {0.0: 0.1, -2.0: 0.05, -4.0: 0.9, -3.0: 0.1}  # out of order by noise
    assert next_level([Try(x, statistics(success=y)) for x, y in levels.items()], WINDOW) == -3.5
