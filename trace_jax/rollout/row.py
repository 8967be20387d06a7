"""Trajectories while they grow, and the chat format that they are written in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, Int

from trace_jax.config import ConfigError
from trace_jax.environments.base import Environment, Episode, Task
from trace_jax.rollout.generator import SampledTurn
from trace_jax.rollout.trajectory import PROMPT_TURN, Trajectory
from trace_jax.rollout.workers import Call

ERROR_CHARACTERS = 400  # of `info["error"]`


class _Piece(NamedTuple):
    """Consecutive ids of one origin; `logprobs` and `kept` of sampled ones only."""

    ids: Int[np.ndarray, " n"]
    turn: int
    logprobs: Float[np.ndarray, " n"] | None = None
    kept: Int[np.ndarray, "n k"] | None = None


class Chat(Protocol):
    """What collection needs of a chat format. `encode_observation` is called from the tool threads."""

    def encode_prompt(self, system: str, user: str) -> Sequence[int]: ...

    def encode_observation(self, text: str) -> Sequence[int]: ...

    def parse_turn(self, ids: Sequence[int]) -> Any: ...  # .kind "call" | "answer" | "malformed", .text


@dataclass(eq=False)
class Row:
    """A trajectory while it grows.

    Attributes:
      number: place in the collection, and the sampler's name for it.
      state: "unstarted" | "sampling" | "opening" (a call waits for the episode) | "tool" | "grading" | "over".
      deadline: moment of `time.monotonic` at which its time is up; set when it starts.
      plain: the prompt without the hint that was sampled with; None without one.
      adapter: see `Generator.start`.
      gate: of its last turn, see `SampledTurn`.
      status: of the trajectory, None while it goes on.
      opening: the call that opens its episode. opened: whether that has ended. episode: what it opened, as long as no
        abandoned thread holds it. call: the call of a tool or of grading that it waits for. code: of its tool call.
    """

    number: int
    task: Task
    group: int
    sample: int
    seed: int
    state: str = "unstarted"
    deadline: float = 0.0
    status: str | None = None
    opening: Call | None = None
    opened: bool = False
    episode: Episode | None = None
    call: Call | None = None
    code: str = ""
    length: int = 0
    tool_calls: int = 0
    answer: str | None = None
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    stale: list[bool] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    experts: Int[np.ndarray, "n L e"] | None = None
    plain: Int[np.ndarray, " p"] | None = None
    adapter: int = 0
    gate: Float[np.ndarray, "L M"] | None = None

    def prompt(self, ids: Int[np.ndarray, " n"]) -> None:
        """Sets the first ids."""
        self._append(_Piece(ids, PROMPT_TURN))

    def turn(self, sampled: SampledTurn) -> None:
        """Appends a sampled turn."""
        kept = None if sampled.kept is None else np.asarray(sampled.kept, np.int32)
        ids, logprobs = np.asarray(sampled.ids, np.int32), np.asarray(sampled.logprobs, np.float32)
        self._append(_Piece(ids, len(self.versions), logprobs, kept))
        self.versions.append(int(sampled.version))
        self.stale.append(bool(sampled.stale))
        self.experts, self.gate = sampled.experts, sampled.gate

    def observation(self, ids: Int[np.ndarray, " n"]) -> None:
        """Appends what the tool answered to the last turn."""
        self._append(_Piece(ids, len(self.versions) - 1))

    def _append(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.length += len(piece.ids)

    def fail(self, status: str, error: str) -> None:
        """Ends it with a status and the reason."""
        self.status = status
        self.info["error"] = error[:ERROR_CHARACTERS]

    def grade(self, total: float, parts: Mapping[str, float], info: Mapping[str, Any]) -> None:
        """Takes a grade; only a finished trajectory has a reward."""
        finished = self.status == "finished"
        self.info |= info
        self.reward = float(total) if finished else 0.0
        self.rewards = {name: float(value) if finished else 0.0 for name, value in parts.items()}

    def trajectory(self, trainable: bool) -> Trajectory:
        """What it became. Unless `trainable`, the log-probabilities of sampled ids are withheld as NaN.

        A hint is taken out again, so that the policy learns to do without. What is left was not sampled from any
        policy: its log-probabilities are withheld, and so are the experts, which saw the hint.
        """
        hinted = self.plain is not None
        pieces = self.pieces if not hinted else [_Piece(self.plain, PROMPT_TURN), *self.pieces[1:]]
        lengths = [len(piece.ids) for piece in pieces]
        withheld = 1.0 if trainable and not hinted else np.nan
        logprobs = [np.zeros(len(p.ids)) if p.logprobs is None else p.logprobs * withheld for p in pieces]
        return Trajectory(
            ids=np.concatenate([piece.ids for piece in pieces]),
            loss_mask=np.repeat([piece.logprobs is not None for piece in pieces], lengths),
            logprobs=np.concatenate(logprobs).astype(np.float32),
            turn_index=np.repeat(np.asarray([piece.turn for piece in pieces], np.int32), lengths),
            versions=tuple(self.versions),
            status=self.status,
            task_index=int(self.task.index),
            group=self.group,
            sample=self.sample,
            reward=self.reward,
            rewards=self.rewards,
            tool_calls=self.tool_calls,
            answer=self.answer,
            info=self.info | ({"hinted": True} if hinted else {}) | self._mixture(),
            labels=dict(self.task.labels),
            stale=tuple(self.stale),
            kept=_kept(pieces),
            experts=None if hinted else self._experts(),
        )

    def _mixture(self) -> dict[str, Any]:
        """`info["gate"]`: the weights of its mixture by layer, the base's last; nothing without a gate."""
        return {} if self.gate is None else {"gate": np.round(self.gate.astype(float), 4).tolist()}

    def _experts(self) -> Int[np.ndarray, "N L e"] | None:
        if self.experts is None:
            return None
        known = len(self.experts)
        rest = np.full((self.length - known, *self.experts.shape[1:]), -1, self.experts.dtype)
        return np.concatenate([self.experts, rest])


def _kept(pieces: Sequence[_Piece]) -> Int[np.ndarray, "N k"] | None:
    width = max((piece.kept.shape[1] for piece in pieces if piece.kept is not None), default=0)
    if not width:
        return None
    kept = np.full((sum(len(piece.ids) for piece in pieces), width), -1, np.int32)
    start = 0
    for piece in pieces:
        if piece.kept is not None:
            kept[start : start + len(piece.ids), : piece.kept.shape[1]] = piece.kept
        start += len(piece.ids)
    return kept


def planned(
    chat: Chat,
    environment: Environment,
    tasks: Sequence[Task | int],
    *,
    group: int,
    context: int,
    seed: int,
    step: int,
    hinted: int = 0,
    adapters: Sequence[int] | None = None,
) -> list[Row]:
    """`group` rows of each task (or index of one) with their prompts, in the order of the tasks.

    Args:
      hinted: members of each group, the first ones, that read the task's hint, if it has one.
      adapters: of each task.

    Raises:
      ConfigError: a prompt that leaves no room for a turn in `context` tokens.
    """
    rows: list[Row] = []
    for place, (task, repeat) in enumerate(_with_repeats(environment, tasks)):
        plain = np.asarray(chat.encode_prompt(task.system, task.user), np.int32)
        helped = bool(hinted and task.hint)
        longer = plain
        if helped:
            longer = np.asarray(chat.encode_prompt(task.system, f"{task.user}\n{task.hint}"), np.int32)
        if len(longer) + 2 > context:
            raise ConfigError(
                f"prompt of task {task.index} has {len(longer)} tokens, rollout.context is {context}: raise it"
            )
        for sample in range(group):
            row = Row(len(rows), task, place, sample, _row_seed(seed, step, task.index, repeat, sample))
            if helped and sample < hinted:
                row.plain = plain
            row.prompt(plain if row.plain is None else longer)
            row.adapter = 0 if adapters is None else adapters[place]
            rows.append(row)
    return rows


def _row_seed(seed: int, step: int, task: int, repeat: int, sample: int) -> int:
    return int(np.random.SeedSequence([seed, step, task, repeat, sample]).generate_state(1, np.uint64)[0])


def _with_repeats(environment: Environment, tasks: Sequence[Task | int]) -> list[tuple[Task, int]]:
    """Each task with how often it was named before."""
    seen: Counter[int] = Counter()
    result = []
    for entry in tasks:
        task = environment.task(int(entry)) if isinstance(entry, int | np.integer) else entry
        result.append((task, seen[task.index]))
        seen[task.index] += 1
    return result
