"""The probe against the plain way: one forward pass of a sequence of its own for every boundary."""

import jax
import numpy as np
import pytest
from flax import nnx
from helpers_hybrid import HYBRID, LORA, adapters
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import BatchConfig, ConfigError, MeshConfig, PolicyConfig
from trace_jax.learner.probe import Probe, Question, transformer_scores
from trace_jax.learner.sharding import make_mesh
from trace_jax.policy import lora
from trace_jax.policy.transformer import Transformer, logical_axes

VOCAB = 61
MODEL = Transformer(
    PolicyConfig(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=48), VOCAB, rngs=nnx.Rngs(3)
)
LONGEST = 96


@jax.jit
def _row(ids):
    """Log-probs of every token of one padded row given those before, from the model's plain scores."""
    segments = jax.numpy.ones_like(ids)
    hidden = MODEL(ids, jax.numpy.arange(ids.shape[1])[None], segments)
    return jax.nn.log_softmax(MODEL.logits(hidden), axis=-1)


def naive(question, scores_of=_row):
    """`l_k` by one forward pass of `S_k`, scaffold and answer for every k."""
    result = []
    for boundary in question.boundaries:
        ids = [*question.ids[:boundary], *question.scaffold, *question.answer]
        padded = np.zeros((1, LONGEST), np.int32)
        padded[0, : len(ids)] = ids
        scores = np.asarray(scores_of(padded), np.float64)[0]
        start = len(ids) - len(question.answer)
        result.append(np.mean([scores[j - 1, ids[j]] for j in range(start, len(ids))]))
    return np.array(result)


def probe(row_length=128, rows=2, buckets=()):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    config = BatchConfig(row_length, rows, buckets)
    return Probe(
        transformer_scores(nnx.graphdef(MODEL)), nnx.state(MODEL, nnx.Param), mesh, logical_axes(MODEL), config
    )


SHARED = probe()
BUCKETS = probe(128, 2, (64,))


@st.composite
def questions(draw, most=5):
    def ids(low, high):
        return draw(st.lists(st.integers(0, VOCAB - 1), min_size=low, max_size=high))

    found = []
    for _ in range(draw(st.integers(1, most))):
        parts = [ids(1, 9)] + [ids(1, 14) for _ in range(draw(st.integers(0, 4)))]
        boundaries = np.cumsum([len(p) for p in parts]).tolist()
        tail = ids(0, 5)  # the final answer, which no boundary sees
        found.append(Question(np.array(sum(parts, []) + tail), boundaries, ids(0, 3), ids(1, 8)))
    return found


@settings(max_examples=25, deadline=None)
@given(questions())
def test_packed_equals_naive(asked):
    for one in (SHARED, BUCKETS):
        for q, found in zip(asked, one(asked), strict=True):
            np.testing.assert_allclose(found, naive(q), atol=1e-5)


def _long():
    """A trajectory with a long and an empty observation: boundaries far apart, and one token apart."""
    rng = np.random.default_rng(0)
    return Question(rng.integers(0, VOCAB, 80), [3, 4, 70, 71, 80], [5], rng.integers(0, VOCAB, 6).tolist())


def test_long_and_empty_observations():
    np.testing.assert_allclose(SHARED([_long()])[0], naive(_long()), atol=1e-5)


def test_branches_that_do_not_fit_one_row_go_to_several():
    """A row as long as the trajectory with one branch is enough."""
    np.testing.assert_allclose(probe(row_length=88)([_long()])[0], naive(_long()), atol=1e-5)


def test_a_row_too_short_is_refused():
    with pytest.raises(ConfigError, match=r"row_length` is 86: a trajectory of 80 tokens and an answer of 7 need 87"):
        probe(row_length=86)([_long()])


def test_what_a_group_has_in_common_is_asked_once():
    """Members with one prompt and one first call share those values to the bit; the work is that of the rest."""
    from trace_jax.learner import probe as module

    rng = np.random.default_rng(1)
    common = rng.integers(0, VOCAB, 20)
    members = [Question(np.append(common, rng.integers(0, VOCAB, 10)), [8, 20, 30], [5], [7, 8, 9]) for _ in range(4)]
    items = module._Rows(members, 128).items
    assert [len(i.boundaries) for i in items] == [3, 1, 1, 1]
    found = probe()(members)
    assert len({f[:2].tobytes() for f in found}) == 1
    for q, f in zip(members, found, strict=True):
        np.testing.assert_allclose(f, naive(q), atol=1e-5)
    # the same state before another answer is another question
    other = Question(common, [8], [5], [9, 8, 7])
    assert len(module._Rows([members[0], other], 128).items) == 2


def test_neighbours_change_nothing():
    """Bit for bit: what shares a row with a question, or follows it, has no influence."""
    rng = np.random.default_rng(2)
    others = [Question(rng.integers(0, VOCAB, 15), [4, 15], [5], [int(rng.integers(VOCAB))]) for _ in range(2)]
    a, b = (SHARED([_long(), other])[0] for other in others)
    np.testing.assert_array_equal(a, b)


def test_one_program_for_each_shape():
    one = probe(128, 2, (64,))
    rng = np.random.default_rng(3)
    for count in (1, 3, 9):
        one([Question(rng.integers(0, VOCAB, 30), [10, 20, 30], [5], [1, 2]) for _ in range(count)])
    assert one.compilations() <= 2


@pytest.mark.parametrize(
    ("question", "says"),
    [
        (Question(np.arange(5), [2, 5], [1], []), "no answer"),
        (Question(np.arange(5), [2, 6], [1], [1]), "do not ascend within its 5 tokens"),
        (Question(np.arange(5), [3, 2], [1], [1]), "do not ascend"),
        (Question(np.arange(5), [], [1], [1]), "do not ascend"),
    ],
)
def test_refuses(question, says):
    with pytest.raises(ValueError, match=says):
        SHARED([question])


def test_nothing_to_ask():
    assert SHARED([]) == []


def test_policies_with_delta_layers_and_adapters_equal_the_plain_way():
    """Branches of recurrent layers go on from the state at their boundary; with adapters off the probe asks the base,
    in whose arrays the adapters are trained."""
    model = Transformer(HYBRID, VOCAB, rngs=nnx.Rngs(4))
    base, pairs = nnx.state(model, nnx.Param), adapters()
    frozen = lora.Frozen(base, lora.scale(LORA))
    rng = np.random.default_rng(8)
    ids = rng.integers(0, VOCAB, 70)
    asked = [
        Question(ids, [1, 2, 9, 9, 40, 70], [5, 6], [7, 8, 9]),
        Question(rng.integers(0, VOCAB, 20), [20], [5], [7]),
    ]
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    config = BatchConfig(128, 2)

    @jax.jit
    def row(pairs, ids):
        in_use = lora.Adapters(pairs, frozen.scale)
        hidden = model(ids, jax.numpy.arange(LONGEST)[None], jax.numpy.ones_like(ids), adapters=in_use)
        return jax.nn.log_softmax(model.logits(hidden), axis=-1)

    off = jax.tree.map(jax.numpy.zeros_like, pairs)
    for params, plain in ((pairs, pairs), (None, off)):
        axes = None if params is None else lora.axes(HYBRID, LORA)
        found = Probe(transformer_scores(nnx.graphdef(model)), params, mesh, axes, config, frozen)(asked)
        for question, values in zip(asked, found, strict=True):
            want = naive(question, lambda padded, plain=plain: row(plain, padded))
            np.testing.assert_allclose(values, want, atol=1e-5)
