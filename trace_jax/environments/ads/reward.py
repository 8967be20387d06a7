"""The composite reward (arXiv 2609.10315).

    r      = w_attr r_attr + w_full r_full + w_fmt r_fmt            0.65, 0.30, 0.05
    r_attr = 1{cause right} * r_slice,   r_slice = 0.5 + 0.5 * Jaccard(predicted, true pairs) for segment causes, else 1
    r_full = 1{r_attr == 1},             r_fmt = 1{the answer parses}

The paper leaves r_fmt open; here it is the lenient parser's success, the same parser that scores the decision.

With `penalty_false_cause` w, which is ours and 0 by default, r falls by w where the answer names a cause that did not
act, whether another did or none: abstaining then is the better mistake. Advantages that are divided by their group's
standard deviation (`grpo.advantage_std`) feel it where a group holds three different rewards: right, abstained, wrong.
In a group of two, such as right and wrong on an episode without a signal, they stay what they were, however large w.
"""

from __future__ import annotations

from collections.abc import Iterable

from trace_jax.config import EnvironmentConfig
from trace_jax.environments.ads.answer import Answer, Pair, parse_exact, parse_lenient
from trace_jax.environments.base import Reward
from trace_jax.simulator.causes import NO_SIGNAL, SEGMENT_CAUSES


def jaccard(predicted: Iterable[Pair], true: Iterable[Pair]) -> float:
    """Shared pairs over all pairs, in [0, 1]; two empty sets agree fully."""
    predicted, true = set(predicted), set(true)
    union = predicted | true
    return len(predicted & true) / len(union) if union else 1.0


def _slice_name(answer: Answer | None) -> str | None:
    """The slice that an answer gives to a segment cause, in one spelling; elsewhere it has no part in the grade."""
    if answer is None or answer.root_cause not in SEGMENT_CAUSES:
        return None
    return " & ".join(f"{attribute}={value}" for attribute, value in answer.driver_segments)


def grade(answer: str, cause: str, driver: Iterable[Pair], config: EnvironmentConfig) -> Reward:
    """Grade an answer text against the hidden label.

    Args:
        answer: the text of the final turn, any text.
        cause: true cause; `driver`: true (attribute, value) pairs, used only if the cause is segment-specific.

    Returns:
        Reward with parts attr, full, format, false_cause (unweighted, in [0, 1]) and info: cause (predicted or None),
        driver (predicted slice of a segment cause as "attribute=value & attribute=value", else None), slice_jaccard
        (None unless the cause is right and segment-specific), parsed, exact_parsed, cause_right, full_right.
    """
    parsed = parse_lenient(answer)
    cause_right = parsed is not None and parsed.root_cause == cause
    overlap = jaccard(parsed.driver_segments, driver) if cause_right and cause in SEGMENT_CAUSES else None
    attr = (1.0 if overlap is None else 0.5 + 0.5 * overlap) if cause_right else 0.0
    full = float(attr == 1.0)
    fmt = float(parsed is not None)
    false_cause = float(parsed is not None and not cause_right and parsed.root_cause != NO_SIGNAL)
    earned = config.reward_attr * attr + config.reward_full * full + config.reward_format * fmt
    return Reward(
        total=earned - config.penalty_false_cause * false_cause,
        parts={"attr": attr, "full": full, "format": fmt, "false_cause": false_cause},
        info={
            "cause": parsed.root_cause if parsed else None,
            "driver": _slice_name(parsed),
            "slice_jaccard": overlap,
            "parsed": parsed is not None,
            "exact_parsed": parse_exact(answer) is not None,
            "cause_right": cause_right,
            "full_right": bool(full),
        },
    )
