"""New parameters in the middle of a collection: nothing is drained, versions and stale caches are accounted for."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from flax import nnx
from helpers_rollout import CONFIG, POLICY, STOP, VOCABULARY, live, prompts_of
from test_rollout_engine import teacher_forced

from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.engine import Engine

# Small calls, so that a turn takes several and parameters can change inside it.
SMALL = dataclasses.replace(CONFIG, decode_steps=2, slots=8)


@pytest.fixture(scope="module")
def models():
    return [Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(seed)) for seed in (0, 9)]


def params_of(model):
    return nnx.state(model, nnx.Param)


def test_new_parameters_take_effect(models):
    """After `set_params` the log-probabilities are those of the new policy; no cache of the old one is shared."""
    engine = Engine(models[0], SMALL, STOP, lanes=1)
    live(engine, prompts_of(8), range(8), turns=1)
    engine.set_params(params_of(models[1]), 5)
    lives = live(engine, prompts_of(8), range(8), turns=2)
    expected = teacher_forced(models[1], lives)
    for r, life in enumerate(lives):
        assert all((turn.version, turn.stale) == (5, False) for turn in life.turns)
        np.testing.assert_allclose([x for _, x in life.sampled], [expected[r][p] for p, _ in life.sampled], atol=1e-5)
    assert engine.stats.swaps == 1


@pytest.mark.parametrize("policy", ["refill", "keep"])
def test_swap_in_flight(models, policy):
    """Rows go on: turns that began after the swap are wholly the new policy's when caches are refilled, and marked
    stale when they are kept; a turn that saw both policies carries the older version."""
    engine = Engine(models[0], dataclasses.replace(SMALL, stale_cache=policy), STOP, lanes=1)
    order, swapped_at = [], []

    def on_turn(turn):
        order.append(turn.row)
        if len(order) == 9:  # some rows are in their second turn, some in their first
            engine.set_params(params_of(models[1]), 1)
            swapped_at.append(len(order))

    lives = live(engine, prompts_of(24, same=3), range(24), turns=3, on_turn=on_turn)
    turns = [turn for life in lives for turn in life.turns]
    assert len(turns) >= 60 and {turn.version for turn in turns} == {0, 1}
    old, new = teacher_forced(models[0], lives), teacher_forced(models[1], lives)
    kinds = {"old": 0, "new": 0, "mixed": 0}
    for r, life in enumerate(lives):
        at = 0
        for k, turn in enumerate(life.turns):
            pairs = life.sampled[at : at + len(turn.ids)]
            at += len(turn.ids)
            got = np.array([x for _, x in pairs])
            by_old, by_new = (np.allclose(got, [e[r][p] for p, _ in pairs], atol=1e-5) for e in (old, new))
            assert turn.version == 0 or not by_old
            if not turn.stale:  # one version of the policy reproduces it
                assert by_new if turn.version == 1 else by_old
            kinds["old" if by_old else "new" if by_new else "mixed"] += 1
            if policy == "refill":
                assert turn.stale == (turn.version == 0 and not by_old)
            elif k and life.turns[k - 1].version == 0 and turn.version == 1:
                assert turn.stale and not by_new  # it attends to the old policy's keys
    assert kinds["old"] and kinds["new"]
    assert (engine.stats.refilled_tokens > 0) == (policy == "refill")
    assert engine.stats.stale_turns == sum(turn.stale for turn in turns)


def test_a_copy_outlives_what_the_learner_donates(models):
    """With `copy` the engine samples on after the learner's arrays are gone."""
    engine = Engine(models[0], SMALL, STOP, lanes=1)
    before = live(engine, prompts_of(4), range(4), turns=1)
    mine = Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(0))
    engine.set_params(params_of(mine), 0, copy=True)
    for leaf in jax.tree.leaves(params_of(mine)):
        leaf.delete()
    after = live(engine, prompts_of(4), range(4), turns=1)
    assert [life.ids for life in after] == [life.ids for life in before]


def test_collection_goes_on_in_the_background_while_a_learner_updates(models):
    """One step ahead: a collection runs in a thread while its parameters are replaced, and the old ones deleted, as a
    learner does that donates its state; every turn is labelled with a version that was set, oldest first."""
    engine = Engine(models[0], SMALL, STOP, lanes=2)
    first = threading.Event()

    def generation():
        return live(engine, prompts_of(32), range(32), turns=3, disorder=1, on_turn=lambda _: first.set())

    with ThreadPoolExecutor(1) as background:
        running = background.submit(generation)
        assert first.wait(120)
        for version in (1, 2, 3):
            update = Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(version))
            engine.set_params(params_of(update), version, copy=True)
            for leaf in jax.tree.leaves(params_of(update)):
                leaf.delete()
        lives = running.result(timeout=300)
    versions = [[turn.version for turn in life.turns] for life in lives]
    assert all(row == sorted(row) for row in versions)
    assert {0, 3} <= {v for row in versions for v in row} <= {0, 1, 2, 3}
    newest = Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(3))
    expected = teacher_forced(newest, lives)
    last = [(r, life) for r, life in enumerate(lives) if life.turns[-1].version == 3 and not life.turns[-1].stale]
    assert last
    for r, life in last:
        pairs = life.sampled[-len(life.turns[-1].ids) :]
        np.testing.assert_allclose([x for _, x in pairs], [expected[r][p] for p, _ in pairs], atol=1e-5)
