"""The gate over base and adapters in the policy: uniform when zero, one adapter when sure, locked at the prompt's end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers_hybrid import HYBRID, adapters
from helpers_rollout import POLICY, VOCABULARY

from trace_jax.config import LoraConfig, MeshConfig, OptimizerConfig
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


def hidden(ids, gate=None, prompt=PROMPT, chosen=None, base=BASE, model=MODEL, frozen=FROZEN):
    """Of the training pass, one sequence a row: with a gate, or with one adapter after the prompt's last token."""
    time = ids.shape[1]
    at = np.tile(np.arange(time), (len(ids), 1))
    if gate is not None:
        lock = jnp.where(at >= prompt - 1, prompt - 1, -1)
        base, used = lora.parts((gate, frozen), lock=lock)
    else:
        pairs = None if chosen is None else frozen.pairs
        mine = None if chosen is None else jnp.where(at >= prompt - 1, chosen, -1)
        used = pairs and lora.Adapters(pairs, frozen.scale, mine)
    merged = nnx.merge(nnx.graphdef(model), base)
    return np.asarray(jax.jit(lambda: merged(ids, at, jnp.ones_like(ids), adapters=used))())


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
    wanted = hidden(IDS, chosen=chosen, base=frozen.base, frozen=frozen)
    np.testing.assert_allclose(found, wanted, atol=1e-5)  # the same sums, in programs that are fused otherwise
    assert np.abs(wanted - hidden(IDS, mixture.init(POLICY, COUNT), base=frozen.base, frozen=frozen)).max() > 1e-3


def test_the_prompt_before_its_last_token_is_the_bases():
    gate = drawn(1.0)
    found, base = hidden(IDS, gate), hidden(IDS)
    np.testing.assert_array_equal(found[:, : PROMPT - 1], base[:, : PROMPT - 1])
    assert np.abs(found - base)[:, PROMPT - 1 :].max(axis=(0, 2)).min() > 1e-3


@pytest.mark.parametrize("policy", [POLICY, dataclasses.replace(HYBRID, layers=2)], ids=["dense", "hybrid"])
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


def learner(config=None, steps=1, axes=None):
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    logprobs = transformer_logprobs(nnx.graphdef(MODEL))
    config = config or OptimizerConfig(learning_rate=0.05, weight_decay=0.0)
    return Learner(logprobs, sft_objective(), config, steps, mesh, axes or mixture.axes(), FROZEN)


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
    assert (pack_buckets([], learning_batch(), lock=True)[0].lock == -1).all()


def learning_batch():
    from trace_jax.config import BatchConfig

    return BatchConfig(32, 2)


def test_only_the_gate_learns():
    items = [Sequence(ids, np.arange(LENGTH) >= PROMPT, prompt=PROMPT) for ids in IDS]
    learning = learner()
    before = jax.tree.map(np.array, (FROZEN.base, FROZEN.pairs))
    state = learning.init(mixture.init(POLICY, COUNT))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim) == 2 * state.params[mixture.GATE].size
    grads = np.asarray(learning.gradients(state.params, pack(items, 32, 2))[mixture.GATE])
    assert (np.abs(grads).max(axis=(1, 2)) > 0).all()  # in every layer
    state, metrics = learning.step(state, pack(items, 32, 2))
    assert metrics["grad_norm"] > 0 and np.abs(state.params[mixture.GATE]).max() > 0.01
    assert jax.tree.all(jax.tree.map(np.array_equal, before, (FROZEN.base, FROZEN.pairs)))

    # by differences: along the gradient the loss changes as it says
    size = 1e-2 / np.linalg.norm(grads)
    losses = [loss_of(items, {mixture.GATE: jnp.asarray(s * size * grads)}) for s in (1, -1)]
    assert (losses[0] - losses[1]) / (2 * size) == pytest.approx(np.sum(grads**2), rel=0.02)


def loss_of(items, gate):
    found = learner().logprobs(gate, pack(items, 32, 2))
    scored = unpack(found, [len(s) for s in items], 32)
    return -np.concatenate([v[s.loss_mask] for s, v in zip(items, scored, strict=True)]).mean()


def test_the_gate_learns_which_adapter_a_prompt_needs():
    """Planted: what follows prompts with the word 4 in them is what one adapter says, after those with 5 the other;
    the gate is trained on some of them and knows the others."""
    rng, items, kinds = np.random.default_rng(0), [], []
    for n in range(48):
        kind = n % 2
        ids = rng.integers(6, VOCABULARY, (1, LENGTH))
        ids[0, 1 + n % 3] = 4 + kind
        ids[0, PROMPT - 1] = 9
        for at in range(PROMPT, LENGTH):  # greedy, by the adapter of its kind
            ids[0, at] = np.argmax(MODEL.logits(jnp.asarray(by_adapter(ids, kind)[0, at - 1])))
        items.append(Sequence(ids[0], np.arange(LENGTH) >= PROMPT, prompt=PROMPT))
        kinds.append(kind)
    learning = learner(OptimizerConfig(learning_rate=0.03, weight_decay=0.0, warmup_steps=1, schedule="constant"), 60)
    state = learning.init(mixture.init(POLICY, COUNT))
    batches, unseen = pack(items[:32], LENGTH, 32), items[32:]
    before = loss_of(unseen, state.params)
    for _ in range(60):
        state, _ = learning.step(state, batches)
    assert loss_of(unseen, state.params) < 0.6 * before
    shares = weights_of(np.stack([s.ids for s in unseen]), state.params)[-1]  # of the last layer
    assert np.mean(shares[:, :2].argmax(1) == kinds[32:]) >= 0.9


_chosen = jax.jit(
    lambda ids, mine: MODEL(
        ids, jnp.arange(LENGTH)[None], jnp.ones_like(ids), adapters=lora.Adapters(PAIRS, FROZEN.scale, mine)
    )
)


def by_adapter(ids, kind):
    return _chosen(ids, jnp.where(jnp.arange(LENGTH)[None] >= PROMPT - 1, kind, -1))


def weights_of(ids, gate):
    held = cache.new(POLICY, len(ids), 32, "float32")
    lock = mixture.Lock(jnp.full(len(ids), PROMPT), jnp.zeros((POLICY.layers, len(ids), COUNT + 1)))
    base, used = lora.parts((gate, FROZEN), lock=lock)
    at = np.tile(np.arange(PROMPT), (len(ids), 1))
    done = nnx.merge(nnx.graphdef(MODEL), base).decode(ids[:, :PROMPT], at, at >= 0, held, adapters=used)
    return np.asarray(done.locked)
