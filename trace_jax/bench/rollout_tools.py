"""Slow tools against instant ones, through the collector: tools run while other rows are sampled."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from flax import nnx

from trace_jax.bench import measure
from trace_jax.bench.rollout_compare import compiles, occupancy, ratios
from trace_jax.bench.rollout_drive import Shape, spent
from trace_jax.config import RunConfig
from trace_jax.environments.base import Observation, Reward, Task
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.collect import CollectStats, collect
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.generator import Deliver, Generator, SampledTurn
from trace_jax.rollout.sampling import Sampling

TOOL_SECONDS = 0.05
SHAPE = Shape(prompt=40, turn=32, turns=8, observation=24)
WAVES = 1.5  # trajectories a slot


class _Stopping:
    """A generator whose turns all count as stopped: with an untrained policy that never stops, every turn has its full
    length and is a tool call."""

    def __init__(self, generator: Generator):
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def begin(self, sampling: Sampling, deliver: Deliver) -> None:
        """See `Generator.begin`."""

        def stopped(turn: SampledTurn | BaseException) -> None:
            deliver(dataclasses.replace(turn, stopped=True) if isinstance(turn, SampledTurn) else turn)

        self._generator.begin(sampling, stopped)


class _Chat:
    """Prompts and observations are random ids of fixed lengths, every turn is a call."""

    def __init__(self, vocabulary: int):
        self._vocabulary = vocabulary

    def encode_prompt(self, system: str, user: str) -> np.ndarray:
        return self._ids(int(user), SHAPE.prompt)

    def encode_observation(self, text: str) -> np.ndarray:
        return self._ids(int(text), SHAPE.observation)

    def parse_turn(self, ids: Any) -> Any:
        return SimpleNamespace(kind="call", text="")

    def _ids(self, seed: int, count: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self._vocabulary, count, dtype=np.int32)


class _Environment:
    """Tasks whose tool takes some seconds and says how often it was called."""

    def __init__(self, tasks: int, seconds: float):
        self._tasks, self._seconds = tasks, seconds

    def __len__(self) -> int:
        return self._tasks

    def task(self, index: int) -> Task:
        return Task(index=index, system="", user=str(index), gold_answer="")

    def open(self, task: Task) -> _Episode:
        return _Episode(self._seconds)


class _Episode:
    def __init__(self, seconds: float):
        self._seconds, self._calls = seconds, 0

    def step(self, action: str, *, final_turn: bool = False) -> Observation:
        if self._seconds:
            time.sleep(self._seconds)
        self._calls += 1
        return Observation(str(self._calls))

    def grade(self, answer: str) -> Reward:
        return Reward(0.0)

    def close(self) -> None:
        pass


def overlap(config: RunConfig, repeats: int) -> dict[str, Any]:
    """Collections of more trajectories than slots at the slots of `config`, with a thread for every slot's tool.

    Returns:
      Seconds and decode rates of both, their ratio, occupancies, and what the collector saw of the tools.
    """
    slots, group, vocabulary = config.rollout.slots, config.grpo.group, config.tokenizer.vocab_size
    sizes = {"context": SHAPE.length, "max_turns": SHAPE.turns, "max_turn_tokens": SHAPE.turn}
    limits = dataclasses.replace(config.rollout, **sizes, trajectory_seconds=600.0)
    policy = dataclasses.replace(config.policy, max_length=max(config.policy.max_length, SHAPE.length))
    engine = Engine(Transformer(policy, vocabulary, rngs=nnx.Rngs(0)), limits, stop_id=vocabulary)
    chat = _Chat(vocabulary)
    tasks = math.ceil(slots * WAVES / group)
    trajectories = tasks * group
    sampled = trajectories * SHAPE.turns * SHAPE.turn
    seen: dict[str, list[Any]] = {"instant": [], "slow": []}
    tools = CollectStats()

    def side(name: str, number: int) -> tuple[float, list[Any]]:
        environment = _Environment(tasks, TOOL_SECONDS if name == "slow" else 0.0)
        stats = tools if name == "slow" and number else CollectStats()
        rows: list[Any] = []
        work: Callable[[], None] = lambda: rows.extend(  # noqa: E731
            collect(
                _Stopping(engine), chat, environment, range(tasks), group=group, config=limits, seed=0, step=number,
                workers=slots, sampling=Sampling(), stats=stats,
            )
        )  # fmt: skip
        seconds, counts = spent(engine, work)
        if sum(row.sampled_tokens for row in rows) != sampled:
            raise RuntimeError("bench rollout: a trajectory of the tool comparison ended early")
        if number:
            seen[name].append(counts)
        return seconds, rows

    def one_round(number: int) -> dict[str, float]:
        names = ("instant", "slow") if number % 2 else ("slow", "instant")
        sides = {name: side(name, number) for name in names}
        for a, b in zip(*(rows for _, rows in sides.values()), strict=True):
            if not np.array_equal(a.ids, b.ids):
                raise RuntimeError("bench rollout: slow tools changed what was sampled")
        return {name: seconds for name, (seconds, _) in sides.items()}

    one_round(0)
    compiled = engine.compiled
    rounds = [one_round(1 + i) for i in range(repeats)]
    seconds = {name: measure.spread([r[name] for r in rounds]) for name in seen}
    return {
        "slots": slots,
        "trajectories": trajectories,
        "turns": SHAPE.turns,
        "turn": SHAPE.turn,
        "observation": SHAPE.observation,
        "tool_seconds": TOOL_SECONDS,
        "calls": tools.calls // repeats,
        "tool_seconds_measured": tools.ran / tools.calls,
        "tool_queue_seconds_most": tools.waited_most,
        "tools_alone_seconds": tools.tools_alone / repeats,  # in which nothing was sampled
        "seconds": seconds,
        "tokens_per_second": {name: sampled / times["median"] for name, times in seconds.items()},
        "tool_overlap": ratios([r["instant"] / r["slow"] for r in rounds]),
        "occupancy": {name: occupancy(counts) for name, counts in seen.items()},
        "compiles": compiles(engine, compiled),
    }
