"""The sampler's distribution is the trainer's (case 4 of trainer)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trace_jax import config_io
from trace_jax.config import ConfigError, EvaluationConfig, RolloutConfig
from trace_jax.rollout.sampling import Knobs, Sampling, check_training, draw, token_keys

SHARES = np.array([0.5, 0.3, 0.15, 0.05])
LOGITS = jnp.log(jnp.asarray(SHARES))
DRAW = jax.jit(draw, static_argnames=("greedy", "top_k", "truncate"))


def _keys(n, salt=5):
    seeds = np.stack([np.full(n, salt), np.arange(n)], 1).astype(np.uint32)
    return token_keys(seeds, jnp.zeros(n, jnp.int32))


def _draw(n, logits, sampling):
    return DRAW(_keys(n), jnp.tile(logits, (n, 1)), sampling.knobs, **sampling.static)


def reference(logits, sampling):
    """Ids that can be drawn, likeliest first, and their probabilities: the definitions, one id after another, float64.

    Also how close the nearest decision was, so that a test can leave out what float32 decides differently.
    """
    scores = np.asarray(logits, np.float64) / sampling.temperature
    ids = [i for i in sorted(range(len(scores)), key=lambda i: (-scores[i], i)) if scores[i] > -np.inf]
    ids = ids[: sampling.top_k or None]
    weights = np.exp(scores[ids] - scores[ids[0]])
    probabilities, margin = weights / weights.sum(), 1.0
    if sampling.top_p < 1:
        sums = np.cumsum(probabilities)
        count = next(n for n, mass in enumerate(sums, 1) if mass >= sampling.top_p or n == len(ids))
        margin = np.abs(sums - sampling.top_p).min()
        while not sampling.top_k and count < len(ids) and scores[ids[count]] == scores[ids[count - 1]]:
            count += 1  # without a bound on their number, ids as likely as the last stay
        ids, probabilities = ids[:count], probabilities[:count]
    relative = probabilities / probabilities[0]
    if sampling.min_p > 0:
        margin = min(margin, np.abs(relative - sampling.min_p)[1:].min(initial=1.0))
    left = relative >= sampling.min_p
    ids, probabilities = np.asarray(ids)[left], probabilities[left]
    return ids, probabilities / probabilities.sum(), margin


def test_tempered_logprobs_are_stored_and_sampled():
    """Case 4: T=0.5 gives p0 = 0.684932 and log p -0.378436, and tokens appear that often."""
    tokens, logprobs, kept = _draw(20000, LOGITS, Sampling(0.5))
    expected = SHARES**2 / np.sum(SHARES**2)
    assert expected[0] == pytest.approx(0.684932, abs=1e-6) and kept is None
    assert np.asarray(logprobs)[np.asarray(tokens) == 0] == pytest.approx(-0.378436, abs=1e-5)
    np.testing.assert_allclose(logprobs, np.log(expected)[np.asarray(tokens)], atol=1e-5)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20000, expected, atol=0.01)


def test_full_distribution_at_temperature_one():
    """Case 4: T=1 stores the model's own log-probabilities."""
    tokens, logprobs, _ = _draw(20000, LOGITS, Sampling())
    np.testing.assert_allclose(logprobs, np.asarray(LOGITS)[np.asarray(tokens)], atol=1e-5)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20000, SHARES, atol=0.01)


def test_top_k_stores_the_truncated_distribution_and_what_was_left():
    """Case 4: with top_k=2, log p(0) = ln 0.625 = -0.4700, not ln 0.5."""
    tokens, logprobs, kept = _draw(500, LOGITS, Sampling(top_k=2))
    assert set(np.unique(tokens)) == {0, 1} and (np.asarray(kept) == [0, 1]).all()
    np.testing.assert_allclose(logprobs, np.log([0.625, 0.375])[np.asarray(tokens)], atol=1e-5)
    check_training(Sampling(top_k=2))


def test_greedy_has_no_logprobs_and_cannot_train():
    """Case 4: greedy rollouts are refused for training."""
    tokens, logprobs, kept = _draw(3, LOGITS, Sampling(0.0, top_k=2, top_p=0.9))
    assert (tokens == 0).all() and np.isnan(logprobs).all() and kept is None
    with pytest.raises(ConfigError, match="greedy"):
        check_training(Sampling(0.0))
    check_training(Sampling(0.5))


@pytest.mark.parametrize(("bad", "named"), [({"top_p": 0.9}, "top_p 0.9"), ({"min_p": 0.1}, "min_p 0.1")])
def test_truncation_without_a_bound_cannot_train(bad, named):
    """Case 4: what the learner cannot replay is refused."""
    with pytest.raises(ConfigError, match=f"{named} without a top_k[^\n]*set a top_k"):
        check_training(Sampling(**bad))
    check_training(Sampling(top_k=8, **bad))


@pytest.mark.parametrize(
    "bad",
    [
        *({"temperature": t} for t in (-1.0, float("nan"), float("inf"))),
        {"top_k": -2},
        *({"top_p": p} for p in (0.0, -0.5, 1.01, float("nan"))),
        *({"min_p": p} for p in (-0.1, 1.01, float("nan"))),
    ],
)
def test_impossible_samplers_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Sampling(**bad)


@pytest.mark.parametrize("vocabulary", [2, 5, 31, 64, 129, 768])
def test_draw_inverts_the_cumulative_distribution(vocabulary):
    """The blocked search agrees with a plain float64 search, and never returns an id of probability zero."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(size=(400, vocabulary)).astype(np.float32) * 3
    logits[:, 1::3] = -np.inf
    seeds = rng.integers(0, 2**32, (400, 2), dtype=np.uint32)
    keys = token_keys(seeds, jnp.arange(400))
    tokens, logprobs = map(np.asarray, DRAW(keys, jnp.asarray(logits), Sampling().knobs)[:2])
    assert np.isfinite(logprobs).all() and (tokens % 3 != 1).all()
    uniform = np.asarray(jax.vmap(lambda key: jax.random.uniform(key))(keys), np.float64)
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum(1, keepdims=True)
    np.testing.assert_allclose(logprobs, np.log(probs[np.arange(400), tokens]), atol=1e-5)
    expected = (np.cumsum(probs, 1) <= (uniform * probs.sum(1))[:, None]).sum(1)
    assert (tokens == expected).mean() > 0.995  # the rest sits within float32 rounding of a boundary
    assert np.abs(tokens - expected).max() <= 3


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_truncation_against_its_definition(data):
    """Kept ids, their order, the drawn id and its log-probability; many ties, ids of probability zero."""
    vocabulary, possible = 33, data.draw(st.sampled_from([7, 33]))
    quarters = st.one_of(st.integers(-24, 24).map(lambda n: n / 4), st.just(-np.inf))
    logits = np.full(vocabulary, -np.inf, np.float32)
    logits[:possible] = data.draw(st.lists(quarters, min_size=possible, max_size=possible))
    assume(np.isfinite(logits).any())
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([0.5, 1.0, 1.7])),
        top_k=data.draw(st.sampled_from([0, 1, 5, 40])),
        top_p=data.draw(st.one_of(st.just(1.0), st.floats(1e-3, 0.999))),
        min_p=data.draw(st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-3, 0.9))),
    )
    ids, probabilities, margin = reference(logits, sampling)
    assume(margin > 1e-5 or sampling.min_p == 1.0)
    tokens, logprobs, kept = map(_numpy, _draw(16, jnp.asarray(logits), sampling))
    if sampling.top_k:
        expected = np.pad(ids, (0, sampling.top_k - len(ids)), constant_values=-1)
        assert kept.dtype == np.int32 and (kept == expected).all()
    else:
        assert kept is None
    place = {int(i): n for n, i in enumerate(ids)}
    assert {int(t) for t in tokens} <= place.keys()
    np.testing.assert_allclose(logprobs, np.log([probabilities[place[int(t)]] for t in tokens]), atol=1e-5)
    if sampling.top_k:  # draws in order of likelihood
        uniform = np.asarray(jax.vmap(lambda key: jax.random.uniform(key))(_keys(16)), np.float64)
        sums = np.cumsum(probabilities)
        clear = np.abs(sums - uniform[:, None]).min(1) > 1e-5
        expected = np.minimum((sums <= uniform[:, None]).sum(1), len(ids) - 1)
        assert (tokens == ids[expected])[clear].all()


def _numpy(x):
    return None if x is None else np.asarray(x)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.8, top_k=6),
        Sampling(1.5, top_k=12, top_p=0.8),
        Sampling(1.0, top_k=12, min_p=0.1),
        Sampling(1.0, top_p=0.7),
        Sampling(1.2, top_p=0.95, min_p=0.05),
    ],
    ids=str,
)
def test_truncated_tokens_come_as_often_as_they_should(sampling):
    """Pearson's statistic of 20,000 draws is below mean + 5 standard deviations of its chi-square distribution."""
    logits = np.random.default_rng(3).normal(size=50).astype(np.float32)
    ids, probabilities, _ = reference(logits, sampling)
    tokens = np.asarray(_draw(20000, jnp.asarray(logits), sampling)[0])
    counts, expected = np.bincount(tokens, minlength=50)[ids], 20000 * probabilities
    assert counts.sum() == 20000 and 3 < len(ids) < 50 and expected.min() > 20
    freedom = len(ids) - 1
    assert np.sum((counts - expected) ** 2 / expected) < freedom + 5 * np.sqrt(2 * freedom)


def test_edges_of_truncation():
    """The likeliest id is always left; a top_p of 1 cuts no tail off; k beyond the vocabulary keeps all of it."""
    skewed = jnp.asarray([0.0, *[-16.0] * 40], jnp.float32)
    kept = np.asarray(_draw(2, skewed, Sampling(top_k=41, top_p=1.0, min_p=1e-9))[2])
    assert (np.sort(kept) == np.arange(41)).all()
    for sampling in (Sampling(top_k=3, top_p=1e-6), Sampling(top_k=3, min_p=1.0), Sampling(top_k=1)):
        tokens, logprobs, kept = _draw(50, LOGITS, sampling)
        assert (np.asarray(kept)[:, 0] == 0).all() and (np.asarray(kept)[:, 1:] == -1).all()
        assert (tokens == 0).all() and (logprobs == 0).all()
    tied = np.asarray(_draw(1, jnp.zeros(9), Sampling(top_k=3))[2])
    assert tied.tolist() == [[0, 1, 2]]
    tokens, logprobs, kept = _draw(50, LOGITS, Sampling(top_k=6))
    assert (np.asarray(kept) == [0, 1, 2, 3, -1, -1]).all()
    np.testing.assert_allclose(logprobs, np.asarray(LOGITS)[np.asarray(tokens)], atol=1e-5)


def test_top_k_does_not_sort_the_vocabulary():
    """On CPU, XLA would turn what is done with the result of `top_k` into slices of a sort, many times slower."""
    sampling = Sampling(0.7, 20, 0.9)
    with jax.default_device(jax.devices("cpu")[0]):
        arguments = (_keys(8), jnp.zeros((8, 768)), sampling.knobs)
        program = DRAW.lower(*arguments, **sampling.static).compile().as_text()
    assert not any(" sort(" in line and "768" in line for line in program.splitlines())


def test_other_numbers_compile_nothing():
    program = jax.jit(lambda *x, **static: draw(*x, **static), static_argnames=("greedy", "top_k", "truncate"))
    for sampling in (Sampling(0.5, 4, 0.9), Sampling(1.0, 4, 1.0, 0.2), Sampling(0.7, 4, 0.5, 0.01)):
        program(_keys(8), jnp.tile(LOGITS, (8, 1)), sampling.knobs, **sampling.static)
    assert program._cache_size() == 1
    assert Sampling(0.5, 4).static == {"greedy": False, "top_k": 4, "truncate": False}
    assert all(isinstance(x, np.float32) for x in Sampling(0.5).knobs) and Sampling(0.5).knobs == Knobs(0.5, 1.0, 0.0)


def test_samplers_of_a_configuration():
    config = RolloutConfig(temperature=0.7, top_k=9, top_p=0.8, min_p=0.01)
    assert Sampling.of(config) == Sampling(0.7, 9, 0.8, 0.01)
    assert Sampling.of(EvaluationConfig(temperature=0.0)).greedy


@pytest.mark.parametrize(
    "overrides",
    [
        {"rollout.top_p": "0.9"},
        {"rollout.min_p": "0.05"},
        {"rollout.top_k": "129"},
        {"rollout.top_p": "0"},
        {"evaluation.top_k": "3", "evaluation.temperature": "0", "evaluation.samples": "1"},
        {"evaluation.top_p": "0.9", "evaluation.temperature": "0", "evaluation.samples": "1"},
        {"evaluation.min_p": "0.1", "evaluation.temperature": "0", "evaluation.samples": "1"},
        {"evaluation.temperature": "0", "evaluation.samples": "5"},
    ],
    ids=str,
)
def test_rules_of_the_configuration(overrides):
    """Case 4: a distribution that cannot be replayed is refused at start, in one line with the mend."""
    name, value = next(iter(overrides.items()))
    with pytest.raises(ConfigError, match=f"^`{name}` is {value}[^\n]*$"):
        config_io.load(None, list(overrides.items()))
    fine = [("rollout.top_k", "20"), ("rollout.top_p", "0.9"), ("rollout.min_p", "0.05"), ("evaluation.top_p", "0.9")]
    config = config_io.load(None, fine)
    assert Sampling.of(config.rollout).trainable and not Sampling.of(config.evaluation).trainable
