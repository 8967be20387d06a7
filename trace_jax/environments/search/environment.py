"""The search environment: questions of several hops, each over a corpus of its own."""

from __future__ import annotations

from dataclasses import dataclass

from trace_jax.config import EnvironmentConfig, SearchConfig
from trace_jax.environments.base import Observation, Reward, Task
from trace_jax.environments.search.answer import grade
from trace_jax.environments.search.prompt import NUDGE, check_style, system_prompt, user_prompt
from trace_jax.environments.search.tool import Library, SearchTool, library

APART = 2**32  # index of the first world of a stream, times the stream's number: no two streams share a world


@dataclass(frozen=True)
class WorldRange:
    """Worlds `first` .. `first + size - 1` of a seed."""

    seed: int
    first: int
    size: int

    def __len__(self) -> int:
        return self.size

    def slice(self, start: int, stop: int) -> WorldRange:
        """Worlds `start` .. `stop - 1` of these."""
        return WorldRange(self.seed, self.first + start, stop - start)


class SearchEnvironment:
    """Tasks over a range of worlds; thread-safe, without any state of its own."""

    def __init__(self, worlds: WorldRange, sizes: SearchConfig, config: EnvironmentConfig):
        check_style(config.prompt)
        self._worlds, self._sizes, self._config = worlds, sizes, config

    def __len__(self) -> int:
        return len(self._worlds)

    def task(self, index: int) -> Task:
        """Task at position `index` of the range; a function of the seed and that world's number."""
        world, style = self._library(index).world, self._config.prompt
        hops = len(world.chain)
        return Task(
            index=index,
            system=system_prompt(style),
            user=user_prompt(world, style),
            gold_answer=world.answer,
            labels={
                "type": f"{hops}_hops",
                "hops": hops,
                "start": world.start,
                "chain": list(world.chain),
                "answer": world.answer,
            },
        )

    def open(self, task: Task) -> SearchEpisode:
        """Start an attempt."""
        return SearchEpisode(task, self._library(task.index), self._sizes.results, self._config)

    def _library(self, index: int) -> Library:
        if not 0 <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        return library(self._sizes, self._worlds.seed, self._worlds.first + index, self._config.prompt)


class SearchEpisode:
    """One attempt at a task. Used by one thread at a time."""

    def __init__(self, task: Task, documents: Library, results: int, config: EnvironmentConfig):
        self._gold, self._hops, self._config = task.gold_answer, int(task.labels["hops"]), config
        self._tool = SearchTool(documents, results=results, characters=config.tool_characters)

    def step(self, action: str, *, final_turn: bool = False) -> Observation:
        """Run a tool call; `final_turn` adds the nudge to answer now."""
        seen = self._tool.run(action)
        return seen.followed_by(NUDGE[self._config.prompt]) if final_turn else seen

    def grade(self, answer: str) -> Reward:
        """Grade the final answer's text (see `search.answer`)."""
        return grade(answer, self._gold, self._hops, self._config.reward_format)

    def close(self) -> None:
        """Nothing is held; may be called any number of times."""

    def __enter__(self) -> SearchEpisode:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
