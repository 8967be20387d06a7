"""The sampler's distribution is the trainer's (case 4 of trainer)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import ConfigError
from trace_jax.rollout.sampling import Sampling, check_training, draw, token_keys

LOGITS = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))


def _draw(n, logits, **options):
    seeds = np.stack([np.full(n, 5), np.arange(n)], 1).astype(np.uint32)
    keys = token_keys(seeds, jnp.zeros(n, jnp.int32))
    return draw(keys, jnp.tile(logits, (n, 1)), jnp.float32(options.pop("temperature", 1.0)), **options)


def test_tempered_logprobs_are_stored_and_sampled():
    """Case 4: T=0.5 gives p0 = 0.684932 on both sides, and tokens appear that often."""
    tokens, logprobs = _draw(20000, LOGITS, temperature=0.5)
    squares = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    expected = squares / squares.sum()
    assert expected[0] == pytest.approx(0.684932, abs=1e-6)
    np.testing.assert_allclose(logprobs, np.log(expected)[np.asarray(tokens)], atol=1e-5)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20000, expected, atol=0.01)


def test_full_distribution_at_temperature_one():
    """Case 4: T=1 stores the model's own log-probabilities."""
    tokens, logprobs = _draw(20000, LOGITS)
    np.testing.assert_allclose(logprobs, np.asarray(LOGITS)[np.asarray(tokens)], atol=1e-5)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20000, [0.5, 0.3, 0.15, 0.05], atol=0.01)


def test_top_k_stores_the_truncated_distribution_and_cannot_train():
    """Case 4: with top_k=2, log p(0) = ln 0.625, not ln 0.5; such a sampler is refused for training."""
    tokens, logprobs = _draw(500, LOGITS, top_k=2)
    assert set(np.unique(tokens)) == {0, 1}
    np.testing.assert_allclose(logprobs[tokens == 0], np.log(0.625), atol=1e-5)
    with pytest.raises(ConfigError, match="top_k 2"):
        check_training(Sampling(1.0, top_k=2))


def test_greedy_has_no_logprobs_and_cannot_train():
    """Case 4: greedy rollouts are refused for training."""
    tokens, logprobs = _draw(3, LOGITS, greedy=True)
    assert (tokens == 0).all() and np.isnan(logprobs).all()
    with pytest.raises(ConfigError, match="greedy"):
        check_training(Sampling(0.0))
    check_training(Sampling(0.5))


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -2}])
def test_impossible_samplers_are_refused(bad):
    with pytest.raises(ConfigError):
        Sampling(**bad)


@pytest.mark.parametrize("vocabulary", [2, 5, 31, 64, 129, 768])
def test_draw_inverts_the_cumulative_distribution(vocabulary):
    """The blocked search agrees with a plain float64 search, and never returns an id of probability zero."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(size=(400, vocabulary)).astype(np.float32) * 3
    logits[:, 1::3] = -np.inf
    seeds = rng.integers(0, 2**32, (400, 2), dtype=np.uint32)
    keys = token_keys(seeds, jnp.arange(400))
    tokens, logprobs = map(np.asarray, draw(keys, jnp.asarray(logits), jnp.float32(1)))
    assert np.isfinite(logprobs).all() and (tokens % 3 != 1).all()
    uniform = np.asarray(jax.vmap(lambda key: jax.random.uniform(key))(keys), np.float64)
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum(1, keepdims=True)
    np.testing.assert_allclose(logprobs, np.log(probs[np.arange(400), tokens]), atol=1e-5)
    expected = (np.cumsum(probs, 1) <= (uniform * probs.sum(1))[:, None]).sum(1)
    assert (tokens == expected).mean() > 0.995  # the rest sits within float32 rounding of a boundary
    assert np.abs(tokens - expected).max() <= 3
