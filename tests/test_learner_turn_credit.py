"""Turn credit against the worked case, a loop written from the paper's formulas, and properties."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.config import TurnCreditConfig
from trace_jax.learner import turn_credit as tc

CONFIG = TurnCreditConfig(enabled=True)
LOGPROBS = np.array([-2.0, -1.0, -1.0, -0.4])


def streams(calls=(2, 2, 2), observations=(3, 3, 3), answer=2, prompt=4):
    """turn_index and loss_mask of a trajectory with so many tokens in each part."""
    turns, mask = [-1] * prompt, [False] * prompt
    for k, (c, o) in enumerate(zip(calls, observations, strict=True)):
        turns += [k] * (c + o)
        mask += [True] * c + [False] * o
    turns += [len(calls)] * answer
    mask += [True] * answer
    return np.array(turns, np.int32), np.array(mask)


def brute(logprobs, outcome, config):
    """r_k, from the formulas of the paper, term by term."""
    d = [config.epsilon - value for value in logprobs]
    T, g, K = len(d) - 1, config.discount, config.look_ahead
    delta = []
    for k in range(T):
        delta.append(
            {
                "log_ratio": math.log(d[0] / d[k + 1]) - math.log(d[0] / d[k]),
                "raw_delta": logprobs[k + 1] - logprobs[k],
                "remaining_gap": (d[k] - d[k + 1]) / d[k],
                "remaining_gap_initial": (d[k] - d[k + 1]) / d[0],
            }[config.form]
        )
    r = []
    for k in range(T):
        h = min(k + K - 1, T - 1)
        top = sum(g ** (u - k) * delta[u] for u in range(k, h + 1))
        c = top / sum(g ** (u - k) for u in range(k, h + 1))
        r.append(c + (config.terminal_fill * g ** (T - k) * outcome if h == T - 1 else 0.0))
    return r


def test_case_7():
    """Case 7 of the trainer's cases: the numbers of the worked example."""
    np.testing.assert_allclose(tc.values(LOGPROBS, 0.1), [0, 0.6466, 0.6466, 1.4351], atol=5e-5)
    deltas = tc.log_ratio(tc.gaps(LOGPROBS, 0.1))
    np.testing.assert_allclose(deltas, [0.6466, 0, 0.7885], atol=5e-5)
    credits = tc.turn_credits(LOGPROBS, CONFIG)
    np.testing.assert_allclose(credits, [0.4718, 0.3504, 0.7885], atol=5e-5)
    np.testing.assert_allclose(tc.turn_rewards(credits, 1.0, CONFIG), [1.4958, 1.6304, 2.3885], atol=5e-5)
    turns, mask = streams()
    advantages = tc.token_advantages(turns, mask, LOGPROBS, 1.0, CONFIG)
    for k, expected in enumerate([1.2992, 1.3261, 1.4777, 1.0]):
        np.testing.assert_allclose(advantages[(turns == k) & mask], expected, atol=5e-5)
    assert not advantages[~mask].any()


@pytest.mark.parametrize("observations", [(3, 3, 3), (300, 3, 1), (0, 0, 0)])
@pytest.mark.parametrize("calls", [(1, 1, 1), (40, 1, 7)])
def test_case_7_lengths_do_not_matter(observations, calls):
    turns, mask = streams(calls, observations, answer=5, prompt=1)
    advantages = tc.token_advantages(turns, mask, LOGPROBS, 1.0, CONFIG)
    by_turn = [np.unique(advantages[(turns == k) & mask]) for k in range(4)]
    assert [len(v) for v in by_turn] == [1, 1, 1, 1]
    np.testing.assert_allclose(np.concatenate(by_turn), [1.2992, 1.3261, 1.4777, 1.0], atol=5e-5)


def test_case_7_special_values():
    turns, mask = streams()
    equal = tc.token_advantages(turns, mask, LOGPROBS, 0.0, CONFIG)
    np.testing.assert_allclose(equal[(turns == 0) & mask], 0.2 * 0.4718, atol=1e-5)
    assert not equal[turns == 3].any()
    flat = tc.token_advantages(turns, mask, np.full(4, -1.3), 0.0, CONFIG)
    assert not flat.any()
    certain = tc.values(np.array([-2.0, 0.0]), 0.1)
    assert certain[1] == pytest.approx(math.log(2.1 / 0.1))
    np.testing.assert_array_equal(
        tc.turn_credits(LOGPROBS, replace(CONFIG, look_ahead=1)), tc.log_ratio(tc.gaps(LOGPROBS, 0.1))
    )
    turns, mask = streams((), ())
    np.testing.assert_allclose(tc.token_advantages(turns, mask, np.array([-2.0]), 0.7, CONFIG)[mask], 0.7)


def test_masked_tokens_after_the_last_turn_count_as_an_observation_only_behind_a_call():
    turns, mask = streams()
    tail_turns, tail_mask = np.append(turns, -1), np.append(mask, False)
    tail_turns[-1] = 3  # an end of turn that a template forces
    assert tc.boundaries(turns, mask) == [4, 9, 14, 19]
    assert len(tc.boundaries(tail_turns, tail_mask)) == 5


def test_boundaries_of_every_ending():
    assert tc.boundaries(*streams((), (), answer=0)) == [4]
    assert tc.boundaries(*streams((2,), (0,))) == [4, 6]  # an empty observation, then the answer
    assert tc.boundaries(*streams((2,), (3,), answer=0)) == [4, 9]  # cut off after a result
    assert tc.boundaries(*streams((2,), (0,), answer=0)) == [4]  # a call that got no result


def test_refuses_what_no_log_probability_can_be():
    for wrong in ([-1.0, 0.5], [-1.0, np.nan], [-np.inf, -1.0]):
        with pytest.raises(ValueError, match="at most 0"):
            tc.values(np.array(wrong), 0.1)
    with pytest.raises(ValueError, match="3 probe values for 3 tool turns"):
        tc.token_advantages(*streams(), np.zeros(3) - 1, 1.0, CONFIG)


logprob_lists = st.lists(st.floats(-12.0, 0.0), min_size=1, max_size=14).map(np.array)
configs = st.builds(
    TurnCreditConfig,
    enabled=st.just(True),
    form=st.sampled_from(sorted(tc.FORMS)),
    look_ahead=st.integers(1, 16),
    discount=st.floats(0.05, 1.0),
    terminal_fill=st.floats(0.0, 3.0),
    coefficient=st.floats(0.0, 1.0),
    epsilon=st.floats(0.01, 1.0),
)


@given(logprob_lists, configs, st.floats(-3, 3))
def test_equals_the_formulas(logprobs, config, outcome):
    rewards = tc.turn_rewards(tc.turn_credits(logprobs, config), outcome, config)
    np.testing.assert_allclose(rewards, brute(logprobs, outcome, config), rtol=1e-9, atol=1e-9)


@given(logprob_lists, st.floats(0.01, 1.0))
def test_telescopes(logprobs, epsilon):
    total = tc.log_ratio(tc.gaps(logprobs, epsilon)).sum()
    assert total == pytest.approx(tc.values(logprobs, epsilon)[-1], abs=1e-9)
    gap = tc.gaps(logprobs, epsilon)
    assert tc.raw_delta(gap).sum() == pytest.approx(logprobs[-1] - logprobs[0], abs=1e-9)


@given(logprob_lists, configs)
def test_credit_lies_between_the_deltas_it_averages(logprobs, config):
    deltas = tc.FORMS[config.form](tc.gaps(logprobs, config.epsilon))
    for k, c in enumerate(tc.turn_credits(logprobs, config)):
        ahead = deltas[k : k + config.look_ahead]
        assert ahead.min() - 1e-9 <= c <= ahead.max() + 1e-9


@given(st.data(), configs, st.floats(-3, 3))
def test_depends_on_turns_only(data, config, outcome):
    """Whatever the lengths of calls and observations, a turn's tokens have one value, that of the turn."""
    logprobs = data.draw(logprob_lists)
    count = len(logprobs) - 1
    calls, observations = (data.draw(st.lists(st.integers(low, 9), min_size=count, max_size=count)) for low in (1, 0))
    turns, mask = streams(calls, observations)
    advantages = tc.token_advantages(turns, mask, logprobs, outcome, config)
    expected = [outcome + config.coefficient * r for r in brute(logprobs, outcome, config)] + [outcome]
    for k, value in enumerate(expected):
        np.testing.assert_allclose(advantages[(turns == k) & mask], value, rtol=1e-9, atol=1e-9)
    assert not advantages[~mask].any()


def test_figures():
    logprobs = [LOGPROBS, np.array([-2.0, -2.0]), np.array([-1.0])]
    found = tc.figures(logprobs, [1.0, 0.0, 0.5], replace(CONFIG, look_ahead=1), turns_shown=4)
    assert found["credit/value_1"] == pytest.approx((0.6466 + 0.0) / 2, abs=1e-4)
    assert found["credit/value_3"] == pytest.approx(1.4351, abs=1e-4) and found["credit/value_4"] is None
    assert found["credit/positive"] == pytest.approx(2 / 4)
    assert found["credit/mean"] == pytest.approx(1.4351 / 4, abs=1e-4)
    last = [1.4351, 0.0, 0.0]
    assert found["credit/reward_correlation"] == pytest.approx(np.corrcoef(last, [1.0, 0.0, 0.5])[0, 1], abs=1e-4)
    assert tc.figures([], [], CONFIG)["credit/mean"] is None
