"""The user's campaign as an environment of one task: the agent's own prompt, tool and tables."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa

from trace_jax.config import EnvironmentConfig
from trace_jax.environments.ads.answer import parse_lenient
from trace_jax.environments.ads.prompt import NUDGE, check_style, system_prompt
from trace_jax.environments.base import Observation, Reward, Task
from trace_jax.environments.tools import PythonTool
from trace_jax.warehouse.database import EpisodeDatabase


class CaseEnvironment:
    """One task over the given tables. Nobody knows its answer: `grade` says whether one can be read, no more.

    Args:
        tables: as in `warehouse.schema`.
        question: the user prompt.
    """

    def __init__(self, tables: Mapping[str, pa.Table], question: str, config: EnvironmentConfig):
        check_style(config.prompt)
        self._config, self._question = config, question
        self._database = EpisodeDatabase(tables, memory_limit_mb=config.memory_limit_mb)

    def __len__(self) -> int:
        return 1

    def task(self, index: int) -> Task:
        """The only task."""
        return Task(index, system_prompt(self._config.prompt), self._question, gold_answer="")

    def open(self, task: Task) -> CaseEpisode:
        """Start an attempt."""
        del task
        return CaseEpisode(self._database.clone(), self._config)

    def close(self) -> None:
        """Give the database back."""
        self._database.close()


class CaseEpisode:
    """One attempt. Used by one thread at a time."""

    def __init__(self, database: EpisodeDatabase, config: EnvironmentConfig):
        self._database, self._config = database, config
        self._tool = PythonTool(
            database, seconds=config.tool_seconds, characters=config.tool_characters, header=config.prompt == "full"
        )
        self._closed = False

    def step(self, action: str, *, final_turn: bool = False) -> Observation:
        """Run the code of a tool call."""
        seen = self._tool.run(action)
        if self._config.prompt == "compact":
            # Empty dimensions leave blanks in the names of slices, which the agent has never read.
            seen = Observation(re.sub(r"(?m)^ +| +(?= )", "", seen.text), seen.error, seen.status)
        return seen.followed_by(NUDGE[self._config.prompt]) if final_turn else seen

    def grade(self, answer: str) -> Reward:
        """Whether the answer can be read."""
        parsed = parse_lenient(answer)
        return Reward(0.0, info={"parsed": parsed is not None, "cause": parsed.root_cause if parsed else None})

    def close(self) -> None:
        """Give the database back; may be called twice."""
        if not self._closed:
            self._closed = True
            self._database.close()
