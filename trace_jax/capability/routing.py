"""Which adapter a task is given to: the base policy reads the task and the list of capabilities and names one by a
label of a single token (arXiv 2604.05336). Nothing is trained for it.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from trace_jax.config import ConfigError
from trace_jax.environments.capability import Capability

BASE = -1  # the policy without an adapter, as `Generator.start` names it
NONE = "None of these: the usual way."
_LABELS = string.ascii_uppercase + string.ascii_lowercase + string.digits


def question(user: str, capabilities: Sequence[Capability], labels: Sequence[str]) -> str:
    """What the router reads in the place of the task.

    Args:
        labels: of each capability, and of the base.
    """
    lines = [
        f"{label}: {text}" for label, text in zip(labels, [*(c.description for c in capabilities), NONE], strict=True)
    ]
    return "\n".join([f"Task: {user}", "What does it need most?", *lines, "Answer with one letter."])


def labels_for(count: int, answer_ids: Callable[[str], Sequence[int]]) -> tuple[str, ...]:
    """The first `count` labels that are one token, each another.

    Args:
        answer_ids: tokens of an answer's text.

    Raises:
        ConfigError: the tokenizer has too few.
    """
    found: dict[int, str] = {}
    for label in _LABELS:
        ids = answer_ids(label)
        if len(ids) == 1:
            found.setdefault(int(ids[0]), label)
    if len(found) < count:
        raise ConfigError(
            f"the tokenizer writes only {len(found)} letters as single tokens, and {count} labels are needed: route "
            "fewer adapters"
        )
    return tuple(found.values())[:count]


def choose(scores: Float[np.ndarray, "T n+1"]) -> Int[np.ndarray, " T"]:
    """The adapter with the largest label log-probability; the last column is the base's. Ties go to the first."""
    best = scores.argmax(1)
    return np.where(best == scores.shape[1] - 1, BASE, best)


def oracle(types: Sequence[str], worlds: Sequence[Mapping[str, float]]) -> Int[np.ndarray, " T"]:
    """What routing would be with the hidden type of each task known: the adapter in whose world that type is the most
    frequent, compared with how frequent it is among these tasks; the base where no world has more of it.

    Args:
        types: of each task.
        worlds: weights of types in the world of each adapter.
    """
    choice = {}
    for name, count in Counter(types).items():
        lifts = [w.get(name, 0.0) / sum(w.values()) * len(types) / count for w in worlds]
        best = int(np.argmax(lifts))
        choice[name] = best if lifts[best] > 1 + 1e-9 else BASE
    return np.array([choice[t] for t in types], int)
