"""The leak detector itself: it finds planted leaks of every kind and stays quiet on noise."""

import numpy as np
import pytest
from leak_probe import hashed_text, number_features, probe, probe_beyond

N, CLASSES = 300, 12


@pytest.fixture(scope="module")
def labels():
    return np.random.default_rng(5).permutation(np.arange(N) % CLASSES)


def weak_hint(labels, share, rng):
    """The label itself for a `share` of the episodes, a random one for the rest."""
    return np.where(rng.random(N) < share, labels, rng.integers(0, CLASSES, N))


def test_weak_leak_in_a_number_is_found(labels):
    counts = 1000 + weak_hint(labels, 0.2, np.random.default_rng(0))
    found = probe(number_features(counts[:, None]), labels)
    assert found.p < 0.01 and found.accuracy > found.chance + 0.05


def test_leak_in_a_word_is_found(labels):
    hint = weak_hint(labels, 0.25, np.random.default_rng(1))
    words = ["alpha", "bravo", "carol", "delta", "ember", "flint", "grape", "hotel", "ivory", "jolly", "karma", "lemon"]
    texts = [f"campaign C{i * 7919 % 10007} {words[h]} has changed" for i, h in enumerate(hint)]
    assert probe(hashed_text(texts), labels).p < 0.01


def test_leak_in_a_residue_is_found(labels):
    rng = np.random.default_rng(2)
    ids = rng.integers(1, 10**6, N) * CLASSES + weak_hint(labels, 0.3, rng)
    assert probe(number_features(ids[:, None]), labels).p < 0.01


def test_two_features_that_only_leak_together_are_found(labels):
    """The label is the pair's cell in a plane, as nearest neighbours can see and a linear rule cannot."""
    rng = np.random.default_rng(3)
    first = rng.random(N)
    second = (first + labels / CLASSES + 0.01 * rng.standard_normal(N)) % 1.0
    assert probe(np.stack([first, second], 1), labels).p < 0.01


def test_p_values_of_pure_noise_are_spread_out(labels):
    ps = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        features = np.concatenate([rng.standard_normal((N, 20)), number_features(rng.integers(0, 99, (N, 1)))], 1)
        ps.append(probe(features, rng.permutation(labels), permutations=40, seed=seed).p)
    assert np.mean(np.array(ps) < 0.1) < 0.25 and 0.3 < np.mean(ps) < 0.75


def test_constant_features_give_chance(labels):
    found = probe(np.ones((N, 5)), labels, permutations=50)
    assert found.p > 0.05 and abs(found.accuracy - 1 / CLASSES) < 0.06


@pytest.mark.slow
def test_beyond_what_is_known(labels):
    """A feature that repeats what is known adds nothing; one with its own hint does."""
    rng = np.random.default_rng(4)
    known = np.eye(3)[labels % 3] + 0.3 * rng.standard_normal((N, 3))
    copy = known @ rng.standard_normal((3, 4)) + 0.05 * rng.standard_normal((N, 4))
    own = np.eye(4)[weak_hint(labels, 0.4, rng) // 3]
    assert probe(copy, labels).p < 0.01
    assert probe_beyond(known, rng.standard_normal((N, 4)), labels).p > 0.02
    assert probe_beyond(known, own, labels).p < 0.04
