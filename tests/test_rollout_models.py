"""The engine with recurrent layers, experts and adapters: what it samples with is what the trainer scores with."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from helpers_hybrid import HYBRID, LORA, adapters
from helpers_rollout import CONFIG, STOP, VOCABULARY, live, prompts_of

from trace_jax.config import MeshConfig, OptimizerConfig
from trace_jax.learner import sharding
from trace_jax.learner.objectives import sft_objective
from trace_jax.learner.packing import Sequence, pack, unpack
from trace_jax.learner.step import Learner, transformer_logprobs
from trace_jax.policy import lora
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.engine import Engine

ROWS = 12
POLICY = dataclasses.replace(HYBRID, layers=2)
MODEL = Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(0))
MESH = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
FROZEN = lora.Frozen(nnx.state(MODEL, nnx.Param), lora.scale(LORA))
RECORDING = dataclasses.replace(CONFIG, slots=ROWS, replay_routes=True)


@pytest.fixture(scope="module")
def engine():
    return Engine(nnx.eval_shape(lambda: MODEL), RECORDING, STOP, lanes=1, frozen=FROZEN)


@pytest.fixture(scope="module")
def learner():
    objective, config = sft_objective(), OptimizerConfig(learning_rate=0.05)
    logprobs = transformer_logprobs(nnx.graphdef(MODEL))
    return Learner(logprobs, objective, config, 2, MESH, lora.axes(POLICY, LORA), FROZEN)


def sequences(lives, replay=False):
    """Sampled tokens as sequences to learn, with the experts they had when the sampler saw them."""
    found = []
    for life in lives:
        mask = np.zeros(len(life.ids), bool)
        mask[[at for at, _ in life.sampled]] = True
        known = life.turns[-1].experts
        experts = np.full((len(life.ids), *known.shape[1:]), -1, np.int16)
        experts[: len(known)] = known
        found.append(Sequence(np.array(life.ids), mask, experts=experts if replay else None))
    return found


def agree(learner, pairs, lives, replay=False):
    items = sequences(lives, replay)
    scored = learner.logprobs(pairs, pack(items, CONFIG.context, 4))
    for life, got in zip(lives, unpack(scored, [len(s) for s in items], CONFIG.context), strict=True):
        at, sampled = zip(*life.sampled, strict=True)
        np.testing.assert_allclose(got[list(at)], sampled, atol=1e-4)


def test_after_a_step_of_adapters_the_sampler_has_what_the_learner_has(engine, learner):
    """Groups share the prompt's prefix although delta layers keep only their newest state; the base stays as it was,
    to the last bit; the optimizer knows adapters only; recorded experts replay."""
    pairs = adapters(POLICY)
    engine.set_params(pairs, 0)
    lives = live(engine, prompts_of(ROWS), range(ROWS), 2, limit=12)
    assert engine.stats.shared_tokens > 0
    agree(learner, pairs, lives)
    before = jax.tree.map(np.array, FROZEN.base)
    state = learner.init(pairs)
    held = sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim)
    assert held == 2 * sum(x.size for x in jax.tree.leaves(pairs))
    state, metrics = learner.step(state, pack(sequences(lives), CONFIG.context, 4))
    assert metrics["grad_norm"] > 0 and 0 < metrics["experts/max_share"] <= 1
    assert jax.tree.all(jax.tree.map(np.array_equal, before, FROZEN.base))
    engine.set_params(state.params, 1)
    after = live(engine, prompts_of(ROWS), range(ROWS), 2, limit=12)
    assert [life.ids for life in after] != [life.ids for life in lives]
    agree(learner, state.params, after, replay=True)


def test_a_row_lives_the_same_life_in_any_company(engine):
    """Fewer rows at once, resumed in disorder: other prefixes are shared, other chunks are fed."""
    engine.set_params(adapters(POLICY), 2)
    together = live(engine, prompts_of(ROWS), range(ROWS), 2, limit=12)
    apart = live(engine, prompts_of(ROWS), range(ROWS), 2, limit=12, window=5, disorder=3)
    assert [life.ids for life in apart] == [life.ids for life in together]
    for a, b in zip(apart, together, strict=True):
        assert [p for _, p in a.sampled] == [p for _, p in b.sampled]
        assert np.array_equal(a.turns[-1].experts, b.turns[-1].experts)


class _Choosing:
    """An engine whose rows have the adapters of a list."""

    def __init__(self, engine, chosen):
        self._engine, self._chosen = engine, chosen

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def start(self, row, prompt, seed, limit):
        self._engine.start(row, prompt, seed, limit, self._chosen[row])


def test_rows_with_different_adapters_live_as_among_their_like():
    """One prompt for all, whose prefix only rows of one adapter may share."""
    frozen = lora.Frozen(FROZEN.base, lora.scale(LORA, 2))
    engine = Engine(nnx.eval_shape(lambda: MODEL), RECORDING, STOP, lanes=1, frozen=frozen)
    engine.set_params(adapters(POLICY, count=2), 0)
    prompts = [np.arange(5, 25)] * ROWS
    mixed = [(-1, 0, 1)[row % 3] for row in range(ROWS)]

    def lives(chosen):
        return [life.ids for life in live(_Choosing(engine, chosen), prompts, [7] * ROWS, 2, limit=12)]

    alone = {adapter: lives([adapter] * ROWS)[0] for adapter in (-1, 0, 1)}
    assert len({tuple(ids) for ids in alone.values()}) == 3
    assert lives(mixed) == [alone[adapter] for adapter in mixed]
