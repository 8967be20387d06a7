"""Hints: some members of a group read one, and nothing of it is left in what is learned (arXiv 2604.05336)."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from helpers_collect import ASK, RESULT, A, B, ToyChat, ToyEnvironment, X, call_then_answer, run

from trace_jax.config import BatchConfig, ConfigError, GRPOConfig, RunConfig
from trace_jax.recipes import grpo


class Hinted(ToyEnvironment):
    """Tasks with an even number have a hint."""

    def task(self, index):
        return dataclasses.replace(super().task(index), hint="" if index % 2 else "ax")


def test_hinted_members_read_the_hint_and_their_trajectories_do_not_hold_it():
    sampler, found = run(call_then_answer, Hinted(), tasks=(0, 1), group=4, hinted=2)
    plain = ToyChat().encode_prompt("a", "b")
    longer = ToyChat().encode_prompt("a", "b\nax")
    first = {row: ids[: len(longer)] for row, ids in sampler.history.items()}
    assert [first[row] == longer for row in range(8)] == [True, True] + 6 * [False]
    assert all(sampler.history[row][: len(plain)] == plain for row in range(2, 8))
    unhinted = found[2]
    for row, t in enumerate(found):
        assert t.ids.tolist() == unhinted.ids.tolist() == [*plain, ASK, A, B, 0, RESULT, X, *unhinted.ids[-3:]]
        np.testing.assert_array_equal(t.loss_mask, unhinted.loss_mask)
        np.testing.assert_array_equal(t.turn_index, unhinted.turn_index)
        hinted = row < 2
        assert t.info.get("hinted", False) == hinted
        assert np.isnan(t.logprobs[t.loss_mask]).all() == hinted and not np.isnan(t.logprobs[~t.loss_mask]).any()


def test_a_prompt_that_only_fits_without_its_hint_is_refused():
    config = RunConfig().rollout
    room = len(ToyChat().encode_prompt("a", "b")) + 2
    with pytest.raises(ConfigError, match=r"prompt of task 0 has .* raise it"):
        run(call_then_answer, Hinted(), group=2, hinted=1, config=dataclasses.replace(config, context=room))


def test_log_probabilities_are_the_learners_under_the_prompt_without_the_hint():
    _, found = run(call_then_answer, Hinted(), tasks=(0, 2), group=3, hinted=1)
    config = RunConfig(grpo=GRPOConfig(microbatch=BatchConfig(row_length=32, rows=2)))

    class Learner:
        mesh = SimpleNamespace(shape={"data": 1, "fsdp": 1})

        def logprobs(self, params, batches):
            """Of each token: minus its position, less what the parameters say."""
            return [-np.asarray(b.positions, np.float32) - params for b in batches]

    scored = grpo._scored_without_hints(Learner(), SimpleNamespace(params=0.5), found, config)
    for before, after in zip(found, scored, strict=True):
        if not before.info.get("hinted"):
            assert after is before
            continue
        np.testing.assert_array_equal(after.ids, before.ids)
        expected = np.where(before.loss_mask, -np.arange(len(before.ids)) - 0.5, 0.0)
        np.testing.assert_array_equal(after.logprobs, expected.astype(np.float32))
        after.behaviour_logprobs()  # refused before
    assert sum(a is not b for a, b in zip(found, scored, strict=True)) == 2
    with pytest.raises(ConfigError):
        found[0].behaviour_logprobs()
    plain = found[1:3]
    assert grpo._scored_without_hints(None, None, plain, config) is plain
