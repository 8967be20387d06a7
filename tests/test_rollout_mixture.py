"""The engine with a gate over adapters: it samples what the learner scores, locks a row's weights at its prompt's end,
shares prompts and nothing behind them, and locks anew what it feeds anew."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers_hybrid import adapters
from helpers_rollout import CONFIG, POLICY, STOP, VOCABULARY, live, prompts_of

from trace_jax.config import LoraConfig, MeshConfig, OptimizerConfig
from trace_jax.learner import sharding
from trace_jax.learner.objectives import sft_objective
from trace_jax.learner.packing import Sequence, pack, unpack
from trace_jax.learner.step import Learner, transformer_logprobs
from trace_jax.policy import lora, mixture
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.generator import SampledTurn
from trace_jax.rollout.row import Row
from trace_jax.rollout.slots import Slots

LORA, COUNT, ROWS = LoraConfig(rank=4, alpha=8.0), 2, 12
MODEL = Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(0))
FROZEN = lora.Frozen(nnx.state(MODEL, nnx.Param), lora.scale(LORA, COUNT), adapters(POLICY, LORA, COUNT))
SMALL = dataclasses.replace(CONFIG, slots=ROWS)


def gate(seed):
    rng = np.random.default_rng(seed)
    return {mixture.GATE: jnp.asarray(rng.normal(0.0, 1.0, (POLICY.layers, POLICY.width, COUNT + 1)), jnp.float32)}


def engine_of(**changes):
    config = dataclasses.replace(SMALL, **changes)
    return Engine(nnx.eval_shape(lambda: MODEL), config, STOP, lanes=1, frozen=FROZEN)


@pytest.fixture(scope="module")
def engine():
    return engine_of()


@pytest.fixture(scope="module")
def learner():
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    logprobs = transformer_logprobs(nnx.graphdef(MODEL))
    return Learner(logprobs, sft_objective(), OptimizerConfig(), 1, mesh, mixture.axes(), FROZEN)


def agree(learner, params, lives, prompts, only=lambda turn: True):
    """Log-probabilities of sampled tokens are those of the training pass, of all turns or of some."""
    items = []
    for life, prompt in zip(lives, prompts, strict=True):
        mask = np.zeros(len(life.ids), bool)
        mask[[at for at, _ in life.sampled]] = True
        items.append(Sequence(np.array(life.ids), mask, prompt=len(prompt)))
    scored = learner.logprobs(params, pack(items, CONFIG.context, 4))
    compared = 0
    for life, got in zip(lives, unpack(scored, [len(s) for s in items], CONFIG.context), strict=True):
        at, sampled = map(np.array, zip(*life.sampled, strict=True))
        wanted = np.repeat([only(turn) for turn in life.turns], [len(turn.ids) for turn in life.turns])
        np.testing.assert_allclose(got[at[wanted]], sampled[wanted], atol=1e-4)
        compared += wanted.sum()
    assert compared > 50


def test_it_samples_what_the_learner_scores_and_weights_stay_what_they_are(engine, learner):
    """Groups share their prompt; over turns, with observations fed between, no weight moves by a bit."""
    params, prompts = gate(1), prompts_of(ROWS)
    engine.set_params(params, 0)
    before = engine.stats.shared_tokens
    lives = live(engine, prompts, range(ROWS), 3, limit=12)
    assert engine.stats.shared_tokens > before
    agree(learner, params, lives, prompts)
    for life in lives:
        assert len(life.turns) > 1
        for turn in life.turns:
            np.testing.assert_array_equal(turn.gate, life.turns[0].gate)
        np.testing.assert_allclose(life.turns[0].gate.sum(-1), 1.0, rtol=1e-6)
    of = [life.turns[0].gate for life in lives]
    np.testing.assert_array_equal(of[0], of[1])  # one prompt
    assert np.abs(of[0] - of[4])[1:].max() > 0.01  # another one

    apart = live(engine, prompts, range(ROWS), 3, limit=12, window=5, disorder=3)
    assert [life.ids for life in apart] == [life.ids for life in lives]


def test_what_is_fed_anew_is_locked_anew(engine, learner):
    """Another gate comes between turns: later ones are all its own, as if it had been there from the start; a cache
    that is kept keeps its weights."""
    prompts, first, second = prompts_of(ROWS), gate(1), gate(2)

    def lives(engine):
        engine.set_params(first, 10)
        done = []

        def swap(turn):
            done.append(turn)
            if len(done) == ROWS:
                engine.set_params(second, 11)

        return live(engine, prompts, range(ROWS), 3, limit=12, on_turn=swap)

    refilled = lives(engine)
    assert engine.stats.refilled_tokens > 0
    agree(learner, second, refilled, prompts, lambda turn: turn.version == 11)
    last, old = refilled[0].turns[-1], refilled[0].turns[0]
    assert (old.version, last.version) == (10, 11) and np.abs(last.gate - old.gate).max() > 0.01
    kept = lives(engine_of(stale_cache="keep"))
    for life in kept:
        assert life.turns[-1].stale and np.array_equal(life.turns[-1].gate, life.turns[0].gate)


def test_nothing_behind_the_last_but_one_token_of_a_prompt_is_shared():
    """A prompt that goes on as another row did: what that row's mixture computed is not the base's."""

    def shared(gate):
        slots = Slots(4, 4, 64, 4, gate=gate)
        ids = np.arange(10, 30)
        row, _ = slots.put(0, (0, 0), ids[:9], 8, 1, True)
        slots.extend(row, ids[9:])
        slots.fed[row.slot] = 19
        other, _ = slots.put(1, (0, 0), ids, 8, 1, True)
        return other.source, slots.source_ready(other)

    assert shared(None) == ((0, 16), True)
    assert shared((2, 3)) == ((0, 8), True)

    slots = Slots(2, 2, 64, 4, gate=(2, 3))
    ids = np.arange(10, 30)
    owner, _ = slots.put(0, (0, 0), ids, 8, 1, True)
    waits, _ = slots.put(1, (0, 0), ids, 8, 1, True)
    assert waits.source == (0, 19) and slots.source_ready(waits) is False
    slots.remove(owner)
    slots.rows[0], slots._prompt[0], slots.fed[0] = owner, 9, 19  # another row with a shorter prompt took the slot
    assert slots.source_ready(waits) is None


def test_a_trajectory_says_what_its_weights_were():
    class Task:
        index, labels = 3, {}

    row = Row(0, Task(), 0, 0, 1)
    row.prompt(np.arange(4))
    weights = np.array([[0.25, 0.75], [0.123456, 0.876544]], np.float32)
    row.turn(SampledTurn(0, np.array([5, STOP]), np.zeros(2), True, 0, gate=weights))
    row.status = "finished"
    assert row.trajectory(True).info == {"gate": [[0.25, 0.75], [0.1235, 0.8765]]}
