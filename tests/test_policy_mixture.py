"""The gate over base and adapters: uniform when zero, one adapter when sure, locked at the prompt's end, learnable."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers_hybrid import HYBRID, adapters
from helpers_rollout import POLICY, VOCABULARY

from trace_jax.config import BatchConfig, LoraConfig, MeshConfig, OptimizerConfig
from trace_jax.learner import sharding
from trace_jax.learner.objectives import sft_objective
from trace_jax.learner.packing import Sequence, pack, pack_buckets, unpack
from trace_jax.learner.step import Learner, transformer_logprobs
from trace_jax.policy import cache, lora, mixture
from trace_jax.policy.transformer import Transformer

LORA = LoraConfig(rank=4, alpha=8.0)
COUNT, PROMPT, LENGTH = 2, 6, 17
MODEL = Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(0))
BASE = nnx.state(MODEL, nnx.Param)
PAIRS = adapters(POLICY, LORA, COUNT)
FROZEN = lora.Frozen(BASE, lora.scale(LORA, COUNT), PAIRS)
IDS = np.random.default_rng(5).integers(4, VOCABULARY, (3, LENGTH))


def drawn(scale, policy=POLICY, count=COUNT, seed=2):
    rng = np.random.default_rng(seed)
    shape = mixture.init(policy, count)[mixture.GATE].shape
    return {mixture.GATE: jnp.asarray(rng.normal(0.0, scale, shape), jnp.float32)}


# Compiled once for each policy and kind of adapters, and run a few times: quick to compile is what counts.
@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _passed(graph, base, pairs, scale, ids, gate, lock, chosen):
    at = jnp.tile(jnp.arange(ids.shape[1]), (len(ids), 1))
    used = None if pairs is None else lora.Adapters(pairs, scale, chosen)
    if gate is not None:
        base, used = lora.parts((gate, lora.Frozen(base, scale, pairs)), lock=lock)
    return nnx.merge(graph, base)(ids, at, jnp.ones_like(ids), adapters=used)


def hidden(ids, gate=None, prompt=PROMPT, chosen=None, base=None, model=MODEL, frozen=FROZEN):
    """Of the training pass, one sequence a row: with a gate, or with one adapter after the prompt's last token."""
    at = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
    lock = mine = None
    if gate is not None:
        lock = jnp.where(at >= prompt - 1, prompt - 1, -1)
    elif chosen is not None:
        mine = jnp.where(at >= prompt - 1, jnp.reshape(jnp.asarray(chosen), (-1, 1)), -1)
    pairs = None if gate is None and chosen is None else frozen.pairs
    base = frozen.base if base is None else base
    return np.asarray(_passed(nnx.graphdef(model), base, pairs, frozen.scale, ids, gate, lock, mine))


def sure_of(which):
    """A gate that whatever it reads has weight 1 on one of the adapters, or on the base (the last)."""
    # the first feature of the layers' input is made positive in `certain`
    gate = np.zeros((POLICY.layers, POLICY.width, COUNT + 1), np.float32)
    gate[:, 0, which] = 1e6
    return {mixture.GATE: jnp.asarray(gate)}


def certain():
    """Frozen parts whose layers are all given a first feature above 0, so that `sure_of` is sure."""
    state = jax.tree.map(lambda x: x, BASE)
    embedding = np.array(state["embedding"][...])
    embedding[:, 0] = 50.0
    state["embedding"] = state["embedding"].replace(jnp.asarray(embedding))
    return FROZEN._replace(base=state)


def test_a_zero_gate_is_the_uniform_mixture():
    """Closed form: where all tokens are after the prompt, W + mean over adapters and base of scale A B."""
    gate = mixture.init(POLICY, COUNT)
    pure = nnx.to_pure_dict(BASE)
    for n in range(COUNT):
        pure = lora.merged(pure, PAIRS, float(FROZEN.scale[n]) / (COUNT + 1), n)
    whole = nnx.state(MODEL, nnx.Param)
    nnx.replace_by_pure_dict(whole, pure)
    wanted = hidden(IDS, base=whole)
    np.testing.assert_allclose(hidden(IDS, gate, prompt=1), wanted, atol=2e-5)
    assert np.abs(wanted - hidden(IDS)).max() > 0.05  # the adapters do something


@pytest.mark.parametrize("which", range(COUNT + 1))
def test_a_sure_gate_is_hard_routing(which):
    frozen = certain()
    found = hidden(IDS, sure_of(which), frozen=frozen)
    chosen = which if which < COUNT else -1
    wanted = hidden(IDS, chosen=chosen, frozen=frozen)
    np.testing.assert_allclose(found, wanted, atol=1e-5)  # the same sums, in programs that are fused otherwise
    assert np.abs(wanted - hidden(IDS, mixture.init(POLICY, COUNT), frozen=frozen)).max() > 1e-3


def test_the_prompt_before_its_last_token_is_the_bases():
    gate = drawn(1.0)
    found, base = hidden(IDS, gate), hidden(IDS)
    np.testing.assert_array_equal(found[:, : PROMPT - 1], base[:, : PROMPT - 1])
    assert np.abs(found - base)[:, PROMPT - 1 :].max(axis=(0, 2)).min() > 1e-3


@pytest.mark.parametrize(
    "policy",
    [POLICY, pytest.param(dataclasses.replace(HYBRID, layers=2), marks=pytest.mark.slow)],
    ids=["dense", "hybrid"],
)
def test_any_chunks_give_what_training_gives_and_weights_stay_locked(policy):
    """One row is cut inside its prompt, one right before and one right behind its end; a hybrid policy has recurrent
    states and experts beside."""
    config = LORA if policy is POLICY else LoraConfig(4, 8.0, ("query", "output", "delta_value", "shared_up"))
    model = Transformer(policy, VOCABULARY, rngs=nnx.Rngs(1))
    frozen = lora.Frozen(nnx.state(model, nnx.Param), lora.scale(config, COUNT), adapters(policy, config, COUNT))
    gate = drawn(1.0, policy)
    wanted = hidden(IDS, gate, model=model, frozen=frozen)
    held = cache.new(policy, 3, 32, "float32")
    lock = mixture.Lock(jnp.full(3, PROMPT), jnp.full((policy.layers, 3, COUNT + 1), jnp.nan))

    @jax.jit
    def feed(ids, positions, valid, held, lock):
        base, used = lora.parts((gate, frozen), lock=lock)
        done = nnx.merge(nnx.graphdef(model), base).decode(ids, positions, valid, held, adapters=used)
        return done.hidden, done.cache, lock._replace(weights=done.locked)

    fed, seen = np.zeros(3, int), []
    for widths in ((2, 5, 6), (3, 1, 4), (4, 4, 4), (4, 4, 3), (4, 3, 0)):
        chunk, positions = np.zeros((3, 6), int), fed[:, None] + np.arange(6)
        for row, width in enumerate(widths):
            chunk[row, :width] = IDS[row, fed[row] : fed[row] + width]
        out, held, lock = feed(chunk, positions, np.arange(6) < np.array(widths)[:, None], held, lock)
        for row, width in enumerate(widths):
            got = np.asarray(out)[row, :width]
            np.testing.assert_allclose(got, wanted[row, fed[row] : fed[row] + width], atol=2e-4)
        fed += widths
        seen.append(np.asarray(lock.weights))
    assert (fed == LENGTH).all()
    for row, first in enumerate((2, 1, 0)):  # the call that fed the prompt's last token
        assert np.isnan(seen[first - 1][:, row]).all() or first == 0
        np.testing.assert_allclose(seen[first][:, row].sum(-1), 1.0, rtol=1e-6)
        for later in seen[first:]:
            np.testing.assert_array_equal(later[:, row], seen[first][:, row])
    assert np.ptp(seen[-1], axis=1)[1:].max() > 0.05  # a later layer tells the rows apart


def learner(config=None, frozen=FROZEN, temperature=1.0):
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    logprobs = transformer_logprobs(nnx.graphdef(MODEL), temperature)
    config = config or OptimizerConfig(learning_rate=0.05, weight_decay=0.0)
    return Learner(logprobs, sft_objective(), config, 1, mesh, mixture.axes(), frozen)


def test_packed_rows_are_what_each_sequence_is_alone():
    """Prompts of several lengths share a row; a sequence's mixture is that of its own prompt."""
    lengths, prompts = (17, 9, 12, 5), (6, 1, 12, 3)
    rng = np.random.default_rng(3)
    items = []
    for n, prompt in zip(lengths, prompts, strict=True):
        items.append(Sequence(rng.integers(4, VOCABULARY, n), np.arange(n) >= max(prompt, 1), prompt=prompt))
    learning, gate = learner(), drawn(1.0)
    together = unpack(learning.logprobs(gate, pack(items, 48, 2)), lengths, 48)
    for item, got in zip(items, together, strict=True):
        alone = unpack(learning.logprobs(gate, pack([item], 48, 2)), [len(item)], 48)[0]
        np.testing.assert_allclose(got, alone, atol=2e-5)
        out = hidden(np.asarray(item.ids)[None], gate, prompt=item.prompt)[0]
        scores = jax.nn.log_softmax(MODEL.logits(out))
        wanted = np.take_along_axis(np.asarray(scores)[:-1], np.asarray(item.ids)[1:, None], 1)[:, 0]
        np.testing.assert_allclose(got[1:], wanted, atol=2e-4)
    with pytest.raises(ValueError, match="where prompts end was not given"):
        learning.logprobs(gate, pack([Sequence(items[0].ids, items[0].loss_mask)], 48, 2))
    with pytest.raises(ValueError, match="sequence 0: a prompt of 18 tokens among 17"):
        pack([dataclasses.replace(items[0], prompt=18)], 48, 2)
    assert (pack_buckets([], BatchConfig(32, 2), lock=True)[0].lock == -1).all()


def test_only_the_gate_learns():
    items = [Sequence(ids, np.arange(LENGTH) >= PROMPT, prompt=PROMPT) for ids in IDS]
    learning = learner()
    before = jax.tree.map(np.array, (FROZEN.base, FROZEN.pairs))
    state = learning.init(mixture.init(POLICY, COUNT))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim) == 2 * state.params[mixture.GATE].size
    grads = np.asarray(learning.gradients(state.params, pack(items, 32, 2))[mixture.GATE])
    assert (np.abs(grads).max(axis=(1, 2)) > 0).all()  # in every layer
    state, metrics = learning.step(state, pack(items, 32, 2))
    assert metrics["grad_norm"] > 0 and np.abs(state.params[mixture.GATE]).max() > 1e-3
    assert jax.tree.all(jax.tree.map(np.array_equal, before, (FROZEN.base, FROZEN.pairs)))

    # by differences: along the gradient the loss changes as it says
    size = 1e-2 / np.linalg.norm(grads)
    losses = []
    for sign in (1, -1):
        found = learning.logprobs({mixture.GATE: jnp.asarray(sign * size * grads)}, pack(items, 32, 2))
        losses.append(-np.mean([v[PROMPT:] for v in unpack(found, [LENGTH] * 3, 32)]))
    assert (losses[0] - losses[1]) / (2 * size) == pytest.approx(np.sum(grads**2), rel=0.02)


def test_the_gate_learns_which_adapter_a_prompt_needs():
    """Planted: what follows prompts with the word 4 in them is what one adapter says, after those with 5 the other.
    Only the last layer has adapters, as the first has not read the prompt, which random weights let through when they
    are larger. The gate is trained on two thirds of the prompts and knows the others."""
    pairs, base = jax.tree.map(lambda x: x.at[0].set(0.0) * 2.0, PAIRS), jax.tree.map(lambda x: x, BASE)
    for name in ("value", "output"):
        base[name] = base[name].replace(base[name][...].at[0].multiply(4.0))
    planted = FROZEN._replace(base=base, pairs=pairs)
    rng, kinds = np.random.default_rng(0), np.arange(48) % 2
    ids = rng.integers(6, 9, (48, 10))
    ids[np.arange(48), 1 + np.arange(48) // 2 % 3] = 4 + kinds
    ids[:, PROMPT - 1] = 9
    for at in range(PROMPT, 10):  # greedy, by the adapter of its kind
        said = hidden(ids, chosen=kinds, frozen=planted)[:, at - 1]
        ids[:, at] = np.argmax(MODEL.logits(jnp.asarray(said)), -1)
    items = [Sequence(row, np.arange(10) >= PROMPT, prompt=PROMPT) for row in ids]
    config = OptimizerConfig(learning_rate=0.02, weight_decay=0.0, warmup_steps=1, schedule="constant")
    learning = learner(config, frozen=planted, temperature=0.2)
    state = learning.init(mixture.init(POLICY, COUNT))
    batches, unseen = pack(items[:32], 10, 32), pack(items[32:], 10, 32)

    def loss(gate):
        return -np.sum(np.where(unseen[0].loss_mask, learning.logprobs(gate, unseen)[0], 0.0)) / 64

    before = loss(state.params)
    for _ in range(20):
        state, _ = learning.step(state, batches)
    shares = weights_of(ids[32:], state.params, planted)[-1]
    assert np.mean(shares[:, :2].argmax(1) == kinds[32:]) >= 0.9
    assert loss(state.params) < 0.2 * before


def weights_of(ids, gate, frozen):
    held = cache.new(POLICY, len(ids), 32, "float32")
    lock = mixture.Lock(jnp.full(len(ids), PROMPT), jnp.zeros((POLICY.layers, len(ids), COUNT + 1)))
    base, used = lora.parts((gate, frozen), lock=lock)
    at = np.tile(np.arange(PROMPT), (len(ids), 1))
    done = nnx.merge(nnx.graphdef(MODEL), base).decode(ids[:, :PROMPT], at, at >= 0, held, adapters=used)
    return np.asarray(done.locked)
