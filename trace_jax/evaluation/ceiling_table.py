"""What the likelihood diagnostician gets right, on accepted and on rejected proposals, by what they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int

from trace_jax.evaluation.ceiling import FINDING, NONE, Diagnosis
from trace_jax.simulator import slices
from trace_jax.simulator.causes import CAUSE_INDEX, CAUSES, NO_SIGNAL, SEGMENT_CAUSES
from trace_jax.simulator.episode import EpisodeBatch
from trace_jax.simulator.vocabulary import PROFILES

_LOCAL = np.array([cause.name in SEGMENT_CAUSES for cause in CAUSES])
_TERCILES = ("weakest third", "middle third", "strongest third")


def label_slices(batch: EpisodeBatch) -> Int[np.ndarray, " E"]:
    """Candidate number of every episode's hidden slice, NONE without [E]."""
    hit = slices.named(np.asarray(batch.slice_attributes), np.asarray(batch.slice_values))
    return np.where(hit.any(1), hit.argmax(1), NONE)


def correct(diagnosis: Diagnosis, batch: EpisodeBatch) -> Bool[np.ndarray, " E"]:
    """FullAttr of each answer: the cause and, for segment causes, the exact slice [E]."""
    local = _LOCAL[np.asarray(batch.cause)]
    same = np.asarray(diagnosis.slice) == label_slices(batch)
    return (np.asarray(diagnosis.cause) == np.asarray(batch.cause)) & (same | ~local)


def quiet(diagnosis: Diagnosis) -> Bool[np.ndarray, " E"]:
    """Whether no cause reaches the probability `FINDING` [E]."""
    causes = np.delete(np.asarray(diagnosis.causes), CAUSE_INDEX[NO_SIGNAL], axis=1)
    return causes.max(1) < FINDING


def groups(batch: EpisodeBatch, strength: tuple[float, float] = (0.0, 1.0)) -> Iterator[tuple[str, str, np.ndarray]]:
    """(section, group, rows) of the table. Onset and strength are those of the episodes in which something happens.

    Args:
        strength: range of the drawn strengths, cut into thirds.
    """
    cause, names = np.asarray(batch.cause), [c.name for c in CAUSES]
    dimensions = (np.asarray(batch.slice_attributes) >= 0).sum(1)
    something, local = cause != names.index(NO_SIGNAL), _LOCAL[cause]
    yield "all", "all", np.ones(len(cause), bool)
    for code, name in enumerate(names):
        yield "cause", name, cause == code
    for d in (1, 2):
        yield "slice", f"{d} attribute{'s' if d > 1 else ''}", local & (dimensions == d)
    for code, name in enumerate(PROFILES):
        yield "onset", name, something & (np.asarray(batch.profile) == code)
    third = np.clip((np.asarray(batch.strength) - strength[0]) / (strength[1] - strength[0]) * 3, 0, 2.999).astype(int)
    for code, name in enumerate(_TERCILES):
        yield "strength", name, something & (third == code)


def table(batch: EpisodeBatch, accept: Bool[np.ndarray, " E"], diagnosis: Diagnosis) -> list[dict]:
    """Rows with the number of accepted and rejected proposals, FullAttr@1 of the diagnostician on both (None: there are
    none) and the mean probability that it gives its own answer, which says whether it is calibrated."""
    right, accept = correct(diagnosis, batch), np.asarray(accept)
    sure = np.asarray(diagnosis.probability, np.float64)
    rows = []
    for section, group, member in groups(batch):
        row: dict = {"section": section, "group": group}
        for name, of in (("accepted", member & accept), ("rejected", member & ~accept)):
            row[name] = int(of.sum())
            row[f"{name}_full"] = float(right[of].mean()) if of.any() else None
            row[f"{name}_sure"] = float(sure[of].mean()) if of.any() else None
        rows.append(row)
    return rows
