"""Attempts, as labellers read them, from what was sampled and from what a scripted agent wrote."""

from __future__ import annotations

from trace_jax.config import RolloutConfig
from trace_jax.environments.base import Task, Transcript
from trace_jax.environments.capability import Attempt
from trace_jax.policy.chat import Chat
from trace_jax.rollout.trajectory import Trajectory


def of_trajectory(t: Trajectory, chat: Chat, limits: RolloutConfig) -> Attempt:
    """What a policy did, decoded.

    Args:
        limits: those it was sampled with; they tell a turn that never ends from one that found no more room.
    """
    steps: list[tuple[str, str]] = []
    kind, length, before = "", 0, 0
    for k in range(int(t.turn_index.max(initial=-1)) + 1):
        mine = t.turn_index == k
        sampled, seen = t.ids[mine & t.loss_mask].tolist(), t.ids[mine & ~t.loss_mask].tolist()
        turn = chat.parse_turn(sampled)
        kind, length = turn.kind, len(sampled)
        if kind == "call" and seen:  # a last call was not run
            steps.append((turn.text, "".join(text for _, text in chat.given(seen))))
            before += length + len(seen)
    user = "".join(text for role, text in chat.given(t.ids[t.turn_index < 0].tolist()) if role == "user")
    return Attempt(
        user=user,
        steps=tuple(steps),
        answer=t.answer,
        ending=_ending(t.status, kind, length, before, limits.max_turn_tokens),
        facts=t.labels,
        passed=bool(t.info.get("full_right")),
    )


def of_transcript(task: Task, transcript: Transcript, passed: bool) -> Attempt:
    """What a scripted agent did."""
    return Attempt(task.user, tuple(transcript.steps), transcript.answer, "answered", task.labels, passed)


def _ending(status: str, kind: str, length: int, before: int, most: int) -> str:
    """See `environments.capability.ENDINGS`.

    Args:
        kind: of the last turn. length: its sampled tokens. before: tokens of the calls before it. most: tokens that a
            turn may have.
    """
    if status in ("finished", "malformed"):
        return {"finished": "answered"}.get(status, status)
    if status != "truncated":
        return "lost"
    # An unfinished turn that hit its own limit, or that filled the room by itself, would not have ended.
    unfinished = kind == "malformed" and (length >= most or length > before)
    return "runaway" if unfinished else "exhausted"
