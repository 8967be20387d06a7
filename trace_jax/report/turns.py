"""A trajectory turn by turn: what was said and read, how likely it was, and what each turn was worth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trace_jax.config import TurnCreditConfig
from trace_jax.learner import turn_credit
from trace_jax.policy.chat import Chat, Turn
from trace_jax.rollout.trajectory import PROMPT_TURN, Trajectory


@dataclass(frozen=True)
class Step:
    """One turn of the policy, and what it read then.

    Attributes:
        tokens: that it sampled. observed: those of the observation.
        logprob: mean log-probability of the sampled tokens under the distribution they were drawn from, nats; None
            where nobody recorded it (greedy sampling).
        unlikeliest: the least likely token, as text, and its log-probability; None likewise.
        version: of the policy. observation: None after a turn that nothing answered.
    """

    turn: Turn
    tokens: int
    logprob: float | None
    unlikeliest: tuple[str, float] | None
    version: int | None
    observation: str | None
    observed: int


@dataclass(frozen=True)
class Worth:
    """What a turn did for the answer, see `learner.turn_credit`.

    Attributes:
        value: V after the turn, None for a turn without a result.
        delta: change of V over the turn. credit: its average over the look-ahead.
        advantage: of each of its tokens; None where the trajectory's group is not known.
    """

    value: float | None = None
    delta: float | None = None
    credit: float | None = None
    advantage: float | None = None


def turns_of(t: Trajectory) -> int:
    """Number of turns that the policy began."""
    return int(t.turn_index.max(initial=PROMPT_TURN)) + 1


def prompt(t: Trajectory, chat: Chat) -> list[tuple[str, str]]:
    """What the policy was asked, as (role, text)."""
    return _given(t.ids[t.turn_index == PROMPT_TURN], chat)


def steps(t: Trajectory, chat: Chat) -> list[Step]:
    """Its turns, in order."""
    result = []
    for k in range(turns_of(t)):
        mine = t.turn_index == k
        sampled, read = t.ids[mine & t.loss_mask].tolist(), t.ids[mine & ~t.loss_mask]
        logprobs = t.logprobs[mine & t.loss_mask]
        known = len(logprobs) > 0 and bool(np.isfinite(logprobs).all())
        worst = int(np.argmin(logprobs)) if known else 0
        result.append(
            Step(
                chat.parse_turn(sampled),
                len(sampled),
                float(logprobs.mean()) if known else None,
                (chat.tokenizer.decode([sampled[worst]]), float(logprobs[worst])) if known else None,
                t.versions[k] if k < len(t.versions) else None,
                "".join(text for _, text in _given(read, chat)) if len(read) else None,
                len(read),
            )
        )
    return result


def worth(t: Trajectory, config: TurnCreditConfig, outcome: float | None) -> list[Worth]:
    """Of every turn.

    Args:
        outcome: advantage of the trajectory's reward in its group; None where the group is not known.

    Raises:
        ValueError: its probes are those of another trajectory.
    """
    count = turns_of(t)
    values = deltas = credits = np.zeros(0)
    if t.probes:
        probes = np.array(t.probes)
        values = turn_credit.values(probes, config.epsilon)[1:]
        deltas = turn_credit.FORMS[config.form](turn_credit.gaps(probes, config.epsilon))
        credits = turn_credit.turn_credits(probes, config)
    advantages = None
    if outcome is not None and not config.pays:
        advantages = np.full(len(t), outcome)  # training used the outcome alone
    elif outcome is not None and t.probes:
        advantages = turn_credit.token_advantages(t.turn_index, t.loss_mask, t.probes, outcome, config)
    result = []
    for k in range(count):
        own = np.flatnonzero((t.turn_index == k) & t.loss_mask)
        paid = None if advantages is None or not len(own) else float(advantages[own[0]])
        if k < len(credits):
            result.append(Worth(float(values[k]), float(deltas[k]), float(credits[k]), paid))
        else:
            result.append(Worth(advantage=paid))
    return result


def said(t: Trajectory, chat: Chat) -> list[tuple[str, str, bool]]:
    """`(role, text, sampled)` of each stretch of a trajectory: prompt, then calls, results and the answer."""
    result = [(role, text.strip(), False) for role, text in prompt(t, chat)]
    for k, step in enumerate(steps(t, chat)):
        result.append((step.turn.kind, step.turn.text.strip(), True))
        read = t.ids[(t.turn_index == k) & ~t.loss_mask]
        result += [(role, text.strip(), False) for role, text in _given(read, chat)]
    return [entry for entry in result if entry[1]]


def _given(ids: np.ndarray, chat: Chat) -> list[tuple[str, str]]:
    return chat.given([int(i) for i in ids]) if len(ids) else []
