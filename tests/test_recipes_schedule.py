"""Prompts and batches as functions of (seed, step)."""

from collections import Counter

from trace_jax.recipes import schedule


def test_every_epoch_is_a_permutation_and_batches_continue_across_it():
    """Case 8 of trainer: an epoch boundary inside, no item trained twice in an epoch, none left out."""
    items = [i for step in range(7) for i in schedule.sft_batch(3, step, 4, 14)]
    assert sorted(items[:14]) == sorted(items[14:]) == list(range(14))
    assert items[:14] != items[14:]


def test_a_step_does_not_depend_on_the_steps_before_it():
    late = schedule.grpo_prompts(1, 40, 8, 100, [3, 4, 5], 0.25)
    for step in range(40):
        schedule.grpo_prompts(1, step, 8, 100, [3, 4, 5], 0.25)
    assert schedule.grpo_prompts(1, 40, 8, 100, [3, 4, 5], 0.25) == late
    assert schedule.grpo_prompts(2, 40, 8, 100, [3, 4, 5], 0.25) != late


def test_no_signal_share():
    chosen = [p for step in range(50) for p in schedule.grpo_prompts(0, step, 8, 400, [7, 8], 0.25)]
    assert len(chosen) == 400
    assert Counter(chosen)[7] == Counter(chosen)[8] == 50  # 2 of 8 a step, and none twice in one
    assert len(schedule.grpo_prompts(0, 0, 8, 400, [], 0.25)) == 8


def test_steps_of_sft():
    assert schedule.sft_steps(100, 8, 2) == 25
    assert schedule.sft_steps(10, 8, 1) == 1


def test_a_curriculum_goes_through_its_parts_in_order():
    """Each step stays inside one part, parts follow each other, all parts are used, resumption changes nothing."""
    for steps, stages, count in ((10, 3, 100), (7, 2, 33), (2, 3, 30), (5, 1, 8)):
        windows = [schedule.curriculum(s, steps, stages, count) for s in range(steps)]
        assert windows == sorted(windows)
        assert windows[0][0] == 0 and windows[0][2] == 0
        if steps >= stages:
            assert [w for i, w in enumerate(windows) if i == 0 or w != windows[i - 1]][-1][1] == count
            assert len({w[0] for w in windows}) == stages
        for step, (low, high, first) in enumerate(windows):
            assert low < high and first <= step


def test_collection_seeds_differ_by_purpose_and_step():
    seeds = {schedule.collection_seed(0, purpose, step) for purpose in ("grpo", "validation") for step in range(50)}
    assert len(seeds) == 100
