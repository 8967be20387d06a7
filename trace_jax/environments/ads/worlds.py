"""Targeted worlds: episodes that all call for one capability, with a reward that pays for exercising it.

A world is a generator x_c = G_c(z) over the simulator's knobs (arXiv 2604.05336): z is an episode's number, the knobs
are the mix of episode types and the size of the effects, which the difficulty sets. Tables, tools, prompts and answers
are those of the task itself, so that what an adapter learns here is used there as it is. The reward R_c is denser than
the task's: it also pays for the queries without which the capability is not there, right answer or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trace_jax.config import EnvironmentConfig, SimulatorConfig
from trace_jax.environments.ads.capabilities import CAPABILITIES, Case, evidence_shown, features_shown
from trace_jax.environments.ads.environment import AdsEnvironment, AdsEpisode
from trace_jax.environments.ads.reward import jaccard
from trace_jax.environments.base import Episode, Observation, Reward, Task
from trace_jax.environments.capability import Attempt, Capability, Label
from trace_jax.simulator.causes import LEVELS, NO_SIGNAL, SEGMENT_CAUSES
from trace_jax.warehouse.splits import EpisodeSet

ANY = {"campaign": 30, "mix": 21, "segment_1d": 115, "segment_2d": 49, "no_signal": 20}  # as in the task itself
HALVING = 2.0  # levels of difficulty by which effects become half as large


@dataclass(frozen=True)
class World:
    """One capability's world.

    Attributes:
        capability: its entry in the dictionary.
        types: weights of the episode types.
        hint: a line that says what to do, for some members of a group (`grpo.hints`).
        parts: (weight, value in [0, 1]) of what the reward pays for; the weights sum to 1.
    """

    capability: Capability
    types: Mapping[str, float]
    hint: str
    parts: Callable[[Case], list[tuple[float, float]]]

    def reward(self, attempt: Attempt) -> tuple[float, bool]:
        """R_c in [0, 1], and whether the attempt is a success: nothing that the capability needs is missing.

        Where the capability is not called for (an episode with a cause in the world of abstaining), success is a right
        decision.
        """
        case = Case.of(attempt)
        if case.answer is None:
            return 0.0, False
        label = self.capability.label(attempt)
        success = _decided(case) if label == Label.NA else label == Label.PRESENT
        return sum(weight * value for weight, value in self.parts(case)), success


def harder(simulator: SimulatorConfig, level: float) -> SimulatorConfig:
    """The simulator at a level of difficulty: every two levels halve the effects; 0 leaves them, below 0 they grow."""
    return replace(simulator, strength=simulator.strength * 2.0 ** (-level / HALVING))


def _decided(case: Case) -> bool:
    return (case.answer.root_cause == NO_SIGNAL) == (case.cause == NO_SIGNAL)


def _cause(case: Case) -> float:
    return float(case.answer.root_cause == case.cause)


def _kind(case: Case) -> float:
    return float(LEVELS[case.answer.root_cause] == LEVELS[case.cause])


def _named(case: Case) -> float:
    """How much of the slice was named; of an answer that names none where there is one, nothing."""
    if case.cause not in SEGMENT_CAUSES:
        return float(not case.answer.driver_segments)
    return jaccard(case.answer.driver_segments, case.driver)


def _protocol(case: Case) -> list[tuple[float, float]]:
    works = [step.works for step in case.steps]
    return [(0.6, sum(works) / len(works) if works else 0.0), (0.4, _cause(case))]


def _totals(case: Case) -> list[tuple[float, float]]:
    return [(0.1, 1.0), (0.3, case.totals()), (0.3, _kind(case)), (0.3, _cause(case))]


def _mix(case: Case) -> list[tuple[float, float]]:
    attribute = frozenset(a for a, _ in case.driver)
    looked = case.compared(lambda q: attribute in set(q.slices(1)), ["share"])
    return [(0.1, 1.0), (0.3, looked), (0.3, _kind(case)), (0.3, _cause(case))]


def _slice(case: Case) -> list[tuple[float, float]]:
    looked = case.sliced(frozenset(a for a, _ in case.driver))
    depth = len(frozenset(case.answer.driver_segments)) == len(case.driver)
    return [(0.1, 1.0), (0.25, looked), (0.15, depth), (0.35, _named(case)), (0.15, _cause(case))]


def _siblings(case: Case) -> list[tuple[float, float]]:
    return [(0.1, 1.0), (0.3, features_shown(case)), (0.2, _kind(case)), (0.4, _cause(case))]


def _abstain(case: Case) -> list[tuple[float, float]]:
    sliced = case.compared(lambda q: any(q.groups) and bool(q.metrics))
    return [(0.1, 1.0), (0.15, case.totals()), (0.15, sliced), (0.6, _decided(case))]


def _stop(case: Case) -> list[tuple[float, float]]:
    asked = Counter(" ".join(step.code.split()) for step in case.steps)
    fresh = len(asked) / max(sum(asked.values()), 1)
    return [(0.3, bool(asked)), (0.3, fresh if asked else 0.0), (0.4, _cause(case))]


def _quote(case: Case) -> list[tuple[float, float]]:
    return [(0.1, 1.0), (0.6, evidence_shown(case)), (0.3, _cause(case))]


_SIGNALS = {"campaign": 0.2, "mix": 0.15, "segment_1d": 0.45, "segment_2d": 0.2}
_ROWS: tuple[tuple[str, Mapping[str, float], str, Callable], ...] = (
    ("tool_protocol", ANY, "Every call is one query that runs; read an error and mend it.", _protocol),
    ("campaign_comparison", {"campaign": 1.0}, "The whole campaign moved: compare totals.", _totals),
    ("mix_decomposition", {"mix": 1.0}, "Compare shares of impressions by placement and audience.", _mix),
    ("drill_down", {"segment_1d": 1.0}, "One value of one attribute changed: compare slices.", _slice),
    ("intersection", {"segment_2d": 1.0}, "Two attributes at once: compare pairs of values.", _slice),
    ("sibling_causes", _SIGNALS, "Causes look alike: compare cost, conversion, share and stock, too.", _siblings),
    ("abstaining", {"no_signal": 0.5} | {k: v / 2 for k, v in _SIGNALS.items()}, "It may be noise.", _abstain),
    ("stopping", ANY, "Answer as soon as the results decide.", _stop),
    ("evidence", ANY, "Quote figures exactly as a result shows them.", _quote),
)
_ENTRIES = {c.name: c for c in CAPABILITIES}
WORLDS: Mapping[str, World] = {name: World(_ENTRIES[name], types, hint, parts) for name, types, hint, parts in _ROWS}


def named(text: str) -> tuple[World, float]:
    """World and level of an entry of `environment.worlds`, "NAME" or "NAME@LEVEL"."""
    name, _, level = text.partition("@")
    return WORLDS[name], float(level or 0)


class Mixture:
    """Several worlds as one environment, in turn: task i is task i // n of world i % n. Thread-safe as they are."""

    def __init__(self, parts: Sequence[AdsEnvironment]):
        if len({len(p) for p in parts}) != 1:
            raise ValueError("worlds of different sizes")
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def task(self, index: int) -> Task:
        """Task at position `index` of the mixture."""
        part, own = self._place(index)
        return replace(part.task(own), index=index)

    def open(self, task: Task) -> Episode:
        """Start an attempt. Close the episode to give its database back."""
        part, own = self._place(task.index)
        return part.open(replace(task, index=own))

    def _place(self, index: int) -> tuple[AdsEnvironment, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        return self._parts[index % len(self._parts)], index // len(self._parts)


class WorldEnvironment(AdsEnvironment):
    """The advertising task on a world's episodes, with the world's reward and hint."""

    def __init__(self, episodes: EpisodeSet, config: EnvironmentConfig, world: World):
        super().__init__(episodes, config)
        self._world = world

    def task(self, index: int) -> Task:
        """Task at position `index` of the set."""
        found = super().task(index)
        labels = {**found.labels, "world": self._world.capability.name}
        return replace(found, labels=labels, hint=self._world.hint)

    def open(self, task: Task) -> Episode:
        """Start an attempt. Close the episode to give its database back."""
        return WorldEpisode(super().open(task), task, self._world)


class WorldEpisode:
    """One attempt, which remembers its calls: the reward is for them, too."""

    def __init__(self, inner: AdsEpisode, task: Task, world: World):
        self._inner, self._task, self._world = inner, task, world
        self._steps: list[tuple[str, str]] = []

    def step(self, action: str, *, final_turn: bool = False) -> Observation:
        """Run the code of a tool call."""
        seen = self._inner.step(action, final_turn=final_turn)
        self._steps.append((action, seen.text))
        return seen

    def query(self, sql: str) -> tuple[tuple[Any, ...], ...]:
        """Rows of a query on the agent-visible tables, see `AdsEpisode.query`."""
        return self._inner.query(sql)

    def grade(self, answer: str) -> Reward:
        """R_c of the attempt that ends with this answer; `info` has the task's own grade, and `success`."""
        usual = self._inner.grade(answer)
        passed = bool(usual.info["full_right"])
        attempt = Attempt(self._task.user, tuple(self._steps), answer, "answered", self._task.labels, passed)
        total, success = self._world.reward(attempt)
        return Reward(total, {"world": total, "success": float(success)}, {**usual.info, "success": success})

    def close(self) -> None:
        """Give the database back; may be called twice."""
        self._inner.close()

    def __enter__(self) -> WorldEpisode:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
