"""Can a label be read off some features? A small classifier battery with a permutation null distribution.

Two classifiers (ridge regression on one-hot labels, nearest neighbours) are cross-validated on features that a leak
might hide in. Their predictions are linear in the labels, so the same fitted weights serve every permutation of the
labels and hundreds of permutations cost no more than one fit.

Axis letters: N episodes, F features, C classes, P permutations.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FOLDS = 5
NEIGHBOURS = 7


def hashed_text(texts: Sequence[str], width: int = 256) -> np.ndarray:
    """Words and character 3-grams hashed to `width` counts, as log(1 + count)."""
    out = np.zeros((len(texts), width))
    for row, text in zip(out, texts, strict=True):
        words = re.findall(r"\w+|[^\w\s]", text)
        for part in [*words, *(text[i : i + 3] for i in range(len(text) - 2))]:
            row[zlib.crc32(part.encode()) % width] += 1
    return np.log1p(out)


def number_features(values: Sequence[Sequence[float]], moduli: Sequence[int] = (2, 3, 5, 12)) -> np.ndarray:
    """Numbers as they are, as ten quantile bins, and their residues, so that a linear rule can use any of these."""
    columns = np.asarray(values, dtype=np.float64)
    parts = []
    for x in columns.T:
        edges = np.unique(np.quantile(x, np.linspace(0.1, 0.9, 9)))
        parts += [x[:, None], np.eye(len(edges) + 1)[np.searchsorted(edges, x)]]
        if np.allclose(x, np.round(x)):
            parts += [np.eye(m)[np.round(x).astype(np.int64) % m] for m in moduli]
    return np.concatenate(parts, axis=1)


def standardise(features: np.ndarray) -> np.ndarray:
    """Zero mean, unit variance; constant columns (which say nothing) become zero."""
    spread = features.std(axis=0)
    varies = spread > 1e-9 * (1 + np.abs(features).max(axis=0))
    return np.where(varies, (features - features.mean(axis=0)) / np.where(varies, spread, 1.0), 0.0)


def smoothers(blocks: Sequence[np.ndarray], seed: int = 0) -> list[np.ndarray]:
    """Cross-validated prediction matrices S [N, N]: held-out class scores are `S @ onehot(labels)`.

    Each block of features is standardised and gets the same total weight, so that a wide block of hashed text does not
    drown a single number. Row i of S is zero on episodes of i's own fold.
    """
    scaled = [standardise(b) for b in blocks]
    widths = [max(int(np.any(b != 0, axis=0).sum()), 1) for b in scaled]
    x = np.concatenate([b / np.sqrt(w) for b, w in zip(scaled, widths, strict=True)], axis=1)
    n = len(x)
    gram = x @ x.T
    squares = np.diag(gram)
    distance = squares[:, None] + squares[None, :] - 2 * gram
    fold = np.random.default_rng(seed).permutation(n) % FOLDS
    near, ridges = np.zeros((n, n)), {penalty: np.zeros((n, n)) for penalty in (0.3, 10.0)}
    for f in range(FOLDS):
        test, train = np.flatnonzero(fold == f), np.flatnonzero(fold != f)
        within, across = gram[np.ix_(train, train)], gram[np.ix_(test, train)]
        for penalty, s in ridges.items():
            weights = np.linalg.solve(within + penalty * np.eye(len(train)), across.T).T
            # The intercept is the training mean: what the weights do not explain falls back to class frequencies.
            s[np.ix_(test, train)] = weights + (1 - weights.sum(1, keepdims=True)) / len(train)
        order = np.argsort(distance[np.ix_(test, train)], axis=1, kind="stable")[:, :NEIGHBOURS]
        near[test[:, None], train[order]] = 1 / NEIGHBOURS
    return [near, *ridges.values()]


def accuracies(smoother: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Held-out accuracy for each row of labels [P, N]; ties between classes count as a fair guess."""
    classes = int(labels.max()) + 1
    members = np.eye(classes, dtype=np.float32)[labels]  # [P, N, C]
    # One product for all permutations: many small ones would wait for threads most of the time.
    scores = smoother.astype(np.float32) @ members.transpose(1, 0, 2).reshape(labels.shape[1], -1)
    scores = scores.reshape(labels.shape[1], len(labels), classes).transpose(1, 0, 2)
    best = scores.max(axis=2, keepdims=True) - scores < 1e-5
    return ((best & (members > 0)).sum(axis=2) / best.sum(axis=2)).mean(axis=1)


@dataclass(frozen=True)
class Finding:
    """Best classifier's accuracy, its mean accuracy under permutation, and the permutation p-value of the former."""

    accuracy: float
    chance: float
    p: float

    @classmethod
    def of(cls, accuracy: float, null: np.ndarray) -> Finding:
        return cls(accuracy, float(null.mean()), float((1 + np.sum(null >= accuracy)) / (1 + len(null))))


def probe(features: np.ndarray, labels: Sequence[int], *, permutations: int = 300, seed: int = 0) -> Finding:
    """Do `features` [N, F] say anything about `labels` [N]? The null distribution shuffles the labels."""
    y = np.asarray(labels)
    rng = np.random.default_rng([seed, 1])
    shuffled = np.stack([y, *(rng.permutation(y) for _ in range(permutations))])
    # The best of several classifiers is compared with the best of the same classifiers under each shuffle.
    best = np.max([accuracies(s, shuffled) for s in smoothers([features], seed)], axis=0)
    return Finding.of(float(best[0]), best[1:])


def probe_beyond(
    known: np.ndarray, features: np.ndarray, labels: Sequence[int], *, permutations: int = 40, seed: int = 0
) -> Finding:
    """Do `features` add anything to `known`? The null distribution shuffles the rows of `features` alone, so that what
    `known` says about the label stays as it is."""
    y = np.asarray(labels)[None]
    rng = np.random.default_rng([seed, 2])

    def best(added: np.ndarray) -> float:
        return max(float(accuracies(s, y)[0]) for s in smoothers([known, added], seed))

    found = best(features)
    return Finding.of(found, np.array([best(rng.permutation(features)) for _ in range(permutations)]))
