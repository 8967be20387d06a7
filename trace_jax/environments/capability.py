"""What an agent can be found to lack: the protocol by which an environment names its capabilities and labels them.

Source: arXiv 2604.05336. A capability is something that some tasks call for. A labeller reads one attempt, with what is
known of its task, and says whether the task called for it and whether the agent then showed it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

ENDINGS = ("answered", "malformed", "runaway", "exhausted", "lost")
"""How an attempt ended.

answered: with an answer, readable or not. malformed: a turn was neither a call nor an answer. runaway: a turn never
came to its end. exhausted: turns or room ran out before an answer. lost: a limit of time or the tool itself broke it
off.
"""


class Label(IntEnum):
    """NA: the task does not call for the capability, or nothing shows whether it is there."""

    LACKING = -1
    NA = 0
    PRESENT = 1


@dataclass(frozen=True)
class Attempt:
    """One investigation as a labeller reads it, whatever agent made it.

    Attributes:
        steps: (code, observation text) of each call.
        answer: text of the final answer; None when there was none.
        ending: one of `ENDINGS`.
        facts: the task's labels, hidden from the agent.
        passed: whether the answer was right.
    """

    user: str
    steps: tuple[tuple[str, str], ...]
    answer: str | None
    ending: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    passed: bool = False

    def __post_init__(self):
        if self.ending not in ENDINGS:
            raise ValueError(f"unknown ending {self.ending!r}, expected one of {ENDINGS}")


@dataclass(frozen=True)
class Capability:
    """One entry of an environment's dictionary.

    Attributes:
        name: an identifier. title: a few words, for tables.
        definition: when it is called for, when it is there and when it is lacking; what people and models label by.
        description: one line by which a policy may recognise a task that needs it.
        label: the programmatic labeller, a pure function that never raises on any text.
    """

    name: str
    title: str
    definition: str
    description: str
    label: Callable[[Attempt], Label]
