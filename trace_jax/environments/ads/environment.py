"""The advertising environment: a set of episodes as tasks with one Python tool over the episode's tables."""

from __future__ import annotations

import threading
from typing import Any

from trace_jax.config import EnvironmentConfig
from trace_jax.environments.ads.answer import format_answer, probe_of
from trace_jax.environments.ads.prompt import NUDGE, check_style, system_prompt, user_prompt
from trace_jax.environments.ads.reward import grade
from trace_jax.environments.base import Observation, Reward, Task
from trace_jax.environments.tools import PythonTool
from trace_jax.warehouse import identity
from trace_jax.warehouse.database import EpisodeDatabase
from trace_jax.warehouse.splits import EpisodeSet


class AdsEnvironment:
    """Tasks over an `EpisodeSet`; thread-safe.

    Opening the same task several times at once shares one database and its query cache; Python state is separate.
    """

    def __init__(self, episodes: EpisodeSet, config: EnvironmentConfig):
        check_style(config.prompt)
        self._episodes, self._config = episodes, config
        self._lock = threading.Lock()
        self._opening: dict[int, threading.Lock] = {}
        self._open: dict[int, tuple[EpisodeDatabase, int]] = {}  # database of a task and the episodes that use it

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def episodes(self) -> EpisodeSet:
        """The episodes with their labels: for those who judge, never for an agent."""
        return self._episodes

    def identity(self) -> dict[str, Any]:
        """What the episodes are (`warehouse.identity`); how questions are worded has no part in it."""
        return identity.described(self._episodes)

    def task(self, index: int) -> Task:
        """Task at position `index` of the set."""
        record = self._episodes[index]
        return Task(
            index=index,
            system=system_prompt(self._config.prompt),
            user=user_prompt(record, self._config.prompt),
            gold_answer=(gold := format_answer(record.cause, record.driver)),
            probe=probe_of(gold),
            labels={"cause": record.cause, "type": record.type, "driver": record.driver},
        )

    def open(self, task: Task) -> AdsEpisode:
        """Start an attempt. Close the episode to give its database back."""
        with self._lock:
            gate = self._opening.setdefault(task.index, threading.Lock())
        with gate:  # threads that open the same task wait for the first one's database
            with self._lock:
                held = self._open.get(task.index)
            if held is None:
                tables = self._episodes[task.index].visible()
                held = (EpisodeDatabase(tables, memory_limit_mb=self._config.memory_limit_mb), 0)
            with self._lock:
                database, users = self._open.get(task.index, held)
                handle = database.clone()
                self._open[task.index] = (database, users + 1)
        return AdsEpisode(self, task, handle, self._config)

    def _closed(self, index: int) -> None:
        """An episode of the task was closed; the last one gives the database back."""
        with self._lock:
            gate = self._opening[index]
        with gate, self._lock:
            database, users = self._open.pop(index)
            if users > 1:
                self._open[index] = (database, users - 1)
                return
        database.close()


class AdsEpisode:
    """One attempt at a task. Used by one thread at a time."""

    def __init__(self, environment: AdsEnvironment, task: Task, database: EpisodeDatabase, config: EnvironmentConfig):
        self._environment, self._task, self._database, self._config = environment, task, database, config
        self._tool = PythonTool(
            database, seconds=config.tool_seconds, characters=config.tool_characters, header=config.prompt == "full"
        )
        self._closed = False

    def step(self, action: str, *, final_turn: bool = False) -> Observation:
        """Run the code of a tool call; `final_turn` adds the nudge to answer now."""
        seen = self._tool.run(action)
        return seen.followed_by(NUDGE[self._config.prompt]) if final_turn else seen

    def query(self, sql: str) -> tuple[tuple[Any, ...], ...]:
        """Rows of a query on the agent-visible tables, not cut for a reader: for agents that are programs.

        Raises:
            QueryError: the query is refused or fails.
        """
        return self._database.query(sql, timeout_s=self._config.tool_seconds).rows

    def grade(self, answer: str) -> Reward:
        """Grade the final answer's text (see `ads.reward`)."""
        return grade(answer, self._task.labels["cause"], self._task.labels["driver"], self._config)

    def close(self) -> None:
        """Give the database back; may be called twice."""
        if not self._closed:
            self._closed = True
            self._database.close()
            self._environment._closed(self._task.index)

    def __enter__(self) -> AdsEpisode:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
