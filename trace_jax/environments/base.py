"""What any environment offers to rollout and evaluation: tasks, episodes, observations, rewards.

An environment knows no model and no token: code and answers are text. Whatever implements these protocols trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

STATUSES: tuple[str, ...] = ("ok", "error", "timeout", "tool_failure")


@dataclass(frozen=True)
class Observation:
    """What the agent reads after a tool call. A tool call never raises: its failure is an observation."""

    text: str
    error: bool = False
    status: str = "ok"  # "ok" | "error" (the agent's mistake) | "timeout" | "tool_failure" (the tool's own fault)

    def followed_by(self, line: str) -> Observation:
        """With one more line, the nudge of a final turn."""
        return replace(self, text=f"{self.text}\n{line}")


@dataclass(frozen=True)
class Reward:
    """A graded answer: `total` is what the learner sees, `parts` are its unweighted terms, `info` is for metrics."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One question. What is known of its answer is for grading, probes and metrics; no tool can reach it.

    Attributes:
        gold_answer: a right answer, whole.
        probe: what a probe asks for: the text before it in an answer, the same for every task, and the part of the gold
            answer that a task decides, as a policy would write it. Anything more would only blur what the reference
            knows. None: nothing before, and the whole gold answer.
        labels: for grading and metrics.
        hint: one more line of the question, which some members of a GRPO group may read (`grpo.hints`); empty: none.
    """

    index: int
    system: str
    user: str
    gold_answer: str
    probe: tuple[str, str] | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""


@dataclass(frozen=True)
class Transcript:
    """An investigation: (code, observation text) of each tool call, and the final answer's text.

    Attributes:
        confidence: how sure the agent is, in a unit of its own of which only the order counts; None: it does not say.
    """

    steps: list[tuple[str, str]]
    answer: str
    confidence: float | None = None


class Episode(Protocol):
    """One attempt at a task, with its own tool state. Used by one thread at a time."""

    def step(self, action: str, *, final_turn: bool = False) -> Observation:
        """Run the code of a tool call; `final_turn` adds the nudge to answer now."""
        ...

    def grade(self, answer: str) -> Reward:
        """Grade the text of the final answer; never raises on any text."""
        ...

    def close(self) -> None:
        """Give back what the episode holds; may be called twice."""
        ...


class Environment(Protocol):
    """A fixed set of tasks, addressed by position."""

    def __len__(self) -> int: ...

    def task(self, index: int) -> Task: ...

    def open(self, task: Task) -> Episode: ...
