"""What the recipes know of each environment, in one table: the rest of them works on any that has a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from trace_jax.config import ConfigError, RunConfig
from trace_jax.environments.ads import analyst
from trace_jax.environments.ads.capabilities import CAPABILITIES
from trace_jax.environments.ads.environment import AdsEnvironment, AdsEpisode
from trace_jax.environments.ads.worlds import WORLDS, Mixture, WorldEnvironment, harder, named
from trace_jax.environments.base import Environment, Episode, Task, Transcript
from trace_jax.environments.capability import Capability
from trace_jax.environments.search import corpus, explorer
from trace_jax.environments.search.environment import APART, SearchEnvironment, WorldRange
from trace_jax.evaluation.ceiling_agent import evaluate_ceiling
from trace_jax.evaluation.finders import agents as finders
from trace_jax.evaluation.finders import rules
from trace_jax.evaluation.kinds import KINDS, Kind
from trace_jax.simulator.accepted import accepted_episodes
from trace_jax.simulator.stream import composition_of
from trace_jax.warehouse.splits import EpisodeSet, load_composed, load_split

# Weights of the advertising teacher's episode types. Flatter than the splits: a cause with one lesson in a hundred is
# hardly learnt.
TEACHER_TYPES = {"campaign": 0.2, "mix": 0.12, "segment_1d": 0.33, "segment_2d": 0.25, "no_signal": 0.1}

Agent = Callable[[Episode, Task, np.random.Generator, RunConfig], Transcript]


class TaskSet(Protocol):
    """What tasks are made of; can be sent to another process."""

    def __len__(self) -> int: ...

    def slice(self, start: int, stop: int) -> TaskSet: ...


@dataclass(frozen=True)
class Domain:
    """One environment.

    Attributes:
        split: (configuration, split, folder of what is kept, on_progress) -> its tasks.
        draw: (configuration, name of a stream, number of tasks, on_progress) -> tasks disjoint from all splits.
        environment: (what `draw` gave or a slice of it, configuration) -> these tasks.
        agents: agents without a policy by name, held-out baselines of every run; the first is the SFT teacher.
        rivals: further agents without a policy, scored when asked for.
        bounds: what no agent can do better than, by name: (environment, configuration, on_progress) -> records.
        mend: what to change when the teacher is hardly ever right; None: wrong transcripts are lessons, too.
        atoms: words that the tokenizer keeps as single pieces.
        kind: how answers are measured and shown.
        lesson: what the teacher does for SFT, where it differs from the agent of its name.
        capabilities: what its agents can be found to lack; empty: nobody has named any.
        worlds: weights of episode types in the world of each capability that has one.
    """

    split: Callable[[RunConfig, str, Path, Callable[..., Any] | None], Environment]
    draw: Callable[[RunConfig, str, int, Callable[..., Any] | None], Any]
    environment: Callable[[Any, RunConfig], Environment]
    agents: Mapping[str, Agent]
    mend: str | None
    atoms: tuple[str, ...]
    kind: Kind
    lesson: Agent | None = None
    capabilities: tuple[Capability, ...] = ()
    worlds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    rivals: Mapping[str, Agent] = field(default_factory=dict)
    bounds: Mapping[str, Callable[[Any, RunConfig, Callable[[int, int], Any]], list[Any]]] = field(default_factory=dict)

    @property
    def scripted(self) -> Mapping[str, Agent]:
        """All agents without a policy."""
        return {**self.agents, **self.rivals}

    @property
    def teacher(self) -> str:
        """Name of the agent whose transcripts SFT learns from."""
        return next(iter(self.agents))

    def transcribe(
        self, environment: Environment, index: int, rng: np.random.Generator, config: RunConfig
    ) -> tuple[Task, Transcript, bool]:
        """One attempt of the teacher. Returns the task, the transcript and whether its answer is right."""
        task = environment.task(index)
        episode = environment.open(task)
        try:
            transcript = (self.lesson or self.agents[self.teacher])(episode, task, rng, config)
            return task, transcript, bool(episode.grade(transcript.answer).info["full_right"])
        finally:
            episode.close()


def _ads_split(config: RunConfig, split: str, folder: Path, on_progress: Callable[..., Any] | None) -> AdsEnvironment:
    """Simulated once and kept in `folder`."""
    if config.environment.worlds:
        return _worlds(config, split, folder, on_progress)
    return AdsEnvironment(load_split(config, split, folder, on_progress=on_progress), config.environment)


def _worlds(
    config: RunConfig, split: str, folder: Path, on_progress: Callable[..., Any] | None
) -> AdsEnvironment | Mixture:
    """Episodes of worlds instead of the task's: of each as many, rounded up to a whole number."""
    parts, size = [], -(-getattr(config.data, split) // len(config.environment.worlds))
    for text in config.environment.worlds:
        world, level = named(text)
        episodes = load_composed(
            harder(config.simulator, level),
            config.data.seed,
            f"world-{world.capability.name}-{split}",
            composition_of(size, dict(world.types)),
            folder,
            on_progress,
        )
        parts.append(WorldEnvironment(episodes, config.environment, world))
    return parts[0] if len(parts) == 1 else Mixture(parts)


def _ads_draw(config: RunConfig, name: str, size: int, on_progress: Callable[..., Any] | None) -> EpisodeSet:
    taught = {name: weight for name, weight in TEACHER_TYPES.items() if name not in config.sft.without}
    composition = composition_of(size, taught)
    accepted = accepted_episodes(config.simulator, config.data.seed, name, composition, on_progress=on_progress)
    return EpisodeSet(*accepted, split=name)


_STREAMS = ("train", "validation", "test", "plan", "teacher")  # the last one and all after it are the teacher's chunks


def _search_draw(config: RunConfig, name: str, size: int, on_progress: Callable[..., Any] | None) -> WorldRange:
    del on_progress  # worlds are made when they are opened
    stream, _, number = name.partition("-")
    return WorldRange(config.data.seed, APART * (_STREAMS.index(stream) + int(number or 0)), size)


def _search_environment(worlds: WorldRange, config: RunConfig) -> SearchEnvironment:
    return SearchEnvironment(worlds, config.search, config.environment)


def _search_split(
    config: RunConfig, split: str, folder: Path, on_progress: Callable[..., Any] | None
) -> SearchEnvironment:
    del folder  # nothing has to be kept
    return _search_environment(_search_draw(config, split, getattr(config.data, split), on_progress), config)


def _analyst(episode: Episode, task: Task, rng: np.random.Generator, config: RunConfig) -> Transcript:
    return analyst.investigate(episode, task, rng, config.environment.prompt)


def _analyst_lesson(episode: Episode, task: Task, rng: np.random.Generator, config: RunConfig) -> Transcript:
    found = analyst.investigate(episode, task, rng, config.environment.prompt, config.sft.searches)
    if "stopping" not in config.sft.without:
        return found
    return analyst.keep_asking(episode, found, rng, config.rollout.max_turns)


def _finder(name: str) -> Agent:
    def agent(episode: Episode, task: Task, rng: np.random.Generator, config: RunConfig) -> Transcript:
        del task, rng  # everything that decides comes from the tables
        return finders.investigate(cast(AdsEpisode, episode), name, rules.thresholds(config.evaluation.rules, name))

    return agent


def _explorer(episode: Episode, task: Task, rng: np.random.Generator, config: RunConfig) -> Transcript:
    return explorer.explore(episode, task, rng, config.rollout.max_turns - 1)


def _solver(episode: Episode, task: Task, rng: np.random.Generator, config: RunConfig) -> Transcript:
    del rng
    return explorer.solve(episode, task, config.environment.prompt)


def _search_lesson(episode: Episode, task: Task, rng: np.random.Generator, config: RunConfig) -> Transcript:
    """Mostly the explorer's."""
    if config.search.demonstrations and rng.random() < config.search.demonstrations:
        return _solver(episode, task, rng, config)
    return _explorer(episode, task, rng, config)


DOMAINS: dict[str, Domain] = {
    "ads": Domain(
        split=_ads_split,
        draw=_ads_draw,
        environment=lambda episodes, config: AdsEnvironment(episodes, config.environment),
        agents={"analyst": _analyst},
        mend="raise simulator.days or environment.tool_characters",
        atoms=(),
        kind=KINDS["ads"],
        lesson=_analyst_lesson,
        capabilities=CAPABILITIES,
        worlds={name: world.types for name, world in WORLDS.items()},
        rivals={name: _finder(name) for name in finders.FINDERS},
        bounds={"ceiling": evaluate_ceiling},
    ),
    "search": Domain(
        split=_search_split,
        draw=_search_draw,
        environment=_search_environment,
        agents={"explorer": _explorer, "solver": _solver},
        mend=None,
        # Names are copied, and relations are looked up, where a question, a document and a call hold the same token.
        atoms=(*corpus.WORDS, *corpus.RELATION),
        kind=KINDS["search"],
        lesson=_search_lesson,
    ),
}
SCRIPTED = tuple(name for domain in DOMAINS.values() for name in (*domain.scripted, *domain.bounds))


def domain_of(config: RunConfig) -> Domain:
    """The row of a run's environment."""
    return DOMAINS[config.environment.name]


def check_agent(config: RunConfig, agent: str) -> None:
    """Refuses an agent without a policy that belongs to another environment.

    Raises:
        ConfigError: names the agents of this one.
    """
    own = {**domain_of(config).scripted, **domain_of(config).bounds}
    if agent in SCRIPTED and agent not in own:
        raise ConfigError(
            f"--agent {agent} does not know the tools of `environment.name` {config.environment.name}: "
            f"choose {' or '.join(own)}"
        )
