"""Dynamic sampling: which groups are of use, and which are trained on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import GRPOConfig
from trace_jax.learner.credit import grpo_sequences
from trace_jax.learner.groups import choose, missing, useless
from trace_jax.rollout.trajectory import Trajectory

CONFIG = GRPOConfig(prompts=3, group=3, constant_groups="resample")


def group(number, rewards, statuses=("finished",) * 3, length=6):
    mask = np.arange(length) >= 2
    return [
        Trajectory(
            ids=np.arange(length, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
            turn_index=np.where(mask, 0, -1).astype(np.int32),
            versions=(0,),
            status=status,
            task_index=100 + number,
            group=number,
            sample=sample,
            reward=reward,
        )
        for sample, (reward, status) in enumerate(zip(rewards, statuses, strict=True))
    ]


VARIED, RIGHT, WRONG = [1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]
LOST = ("finished", "timed_out", "tool_failure")


def test_groups_that_teach_nothing():
    batch = group(0, VARIED) + group(1, RIGHT) + group(2, WRONG) + group(3, VARIED, LOST)
    assert useless(batch, CONFIG) == [1, 2, 3]
    # turn credit: a constant group has something to teach, one that is dropped has not
    assert useless(batch, CONFIG, turn_credit=True) == [3]
    # a lost member is either borne or not
    partial = group(0, VARIED, ("finished", "finished", "timed_out"))
    assert useless(partial, CONFIG) == [] and useless(partial, replace(CONFIG, lost_members="drop_group")) == [0]
    # with the overlong filter nothing is left of a group whose other members have exactly the mean's reward
    cut = group(0, [0.0, 0.0, 0.0], ("truncated",) * 3) + group(
        1, [1.0, 0.5, 0.0], ("truncated", "finished", "truncated")
    )
    assert useless(cut, replace(CONFIG, mask_truncated=True)) == [0, 1] and useless(cut, CONFIG) == [0]
    # a penalty for length is an outcome, too
    long = group(0, RIGHT, length=90)[:1] + group(0, RIGHT, length=80)[1:]
    penalty = replace(CONFIG, overlong_buffer=20)
    assert useless(long, penalty, context=100) == [] and useless(long, CONFIG) == [0]


def test_first_useful_groups_are_trained_on():
    """Two of three prompts teach nothing: two more are collected, one of which teaches nothing again."""
    first = group(0, RIGHT) + group(1, VARIED) + group(2, WRONG)
    assert missing(first, CONFIG) == 2
    second = first + group(3, WRONG) + group(4, VARIED)
    assert missing(second, CONFIG) == 1
    third = second + group(5, VARIED) + group(6, VARIED)
    assert missing(third, CONFIG) == 0
    chosen, figures = choose(third, CONFIG)
    assert sorted({t.group for t in chosen}) == [1, 4, 5] and len(chosen) == 9
    assert figures == {
        "resampled_groups": 4.0, "useless_groups": pytest.approx(3 / 7), "chosen_groups": 3.0,
        "constant_groups": pytest.approx(3 / 7), "dropped_groups": 0.0,
        "crashed_episodes": 0.0, "missing_episodes": 0.0,
    }  # fmt: skip
    # choosing does not hide what was lost
    lost = choose(third + group(7, VARIED, LOST), CONFIG)[1]
    assert lost["dropped_groups"] == 1 and lost["crashed_episodes"] == 2 and lost["useless_groups"] == 0.5
    # the bound was reached before: what is there is trained on, nothing else
    chosen, figures = choose(second, CONFIG)
    assert sorted({t.group for t in chosen}) == [1, 4] and figures["chosen_groups"] == 2
    sequences, left_out, _ = grpo_sequences(chosen, CONFIG)
    assert len(sequences) == 6 and left_out == 0
    # whatever choosing leaves out carries no gradient and no denominator either
    same, nothing, _ = grpo_sequences(second, CONFIG)
    assert [s.advantages for s in same] == [s.advantages for s in sequences] and nothing == 0


@pytest.mark.parametrize("policy", ["count", "drop"])
def test_nothing_is_resampled_unless_asked_for(policy):
    batch, config = group(0, RIGHT) + group(1, VARIED), replace(CONFIG, constant_groups=policy)
    assert missing(batch, config) == 0 and choose(batch, config) == (batch, {})


def test_turn_credit_never_resamples_constant_groups():
    batch = group(0, RIGHT) + group(1, VARIED) + group(2, WRONG)
    assert missing(batch, CONFIG, turn_credit=True) == 0
    assert choose(batch, CONFIG, turn_credit=True)[0] == batch
    assert missing(group(0, RIGHT) + group(1, RIGHT, LOST), CONFIG, turn_credit=True) == 2


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([VARIED, RIGHT, WRONG]), min_size=1, max_size=8), st.randoms())
def test_choice_is_a_function_of_the_ordinals(rewards, random):
    """The order in which trajectories arrive has no effect, and never more than `prompts` groups are chosen."""
    batch = [t for number, r in enumerate(rewards) for t in group(number, r)]
    shuffled = batch[:]
    random.shuffle(shuffled)
    found = {t.group for t in choose(shuffled, CONFIG)[0]}
    assert found == set([n for n, r in enumerate(rewards) if r is VARIED][:3])
    assert choose(batch, CONFIG)[1] == choose(shuffled, CONFIG)[1]
    assert missing(shuffled, CONFIG) == 3 - min(rewards.count(VARIED), 3)
