"""Fixed sets of held-out episodes that an evaluation may use instead of a run's own test split (`evaluation.set`).

A set is a function of its name: it does not depend on the difficulty that a run trains at. Each has rules of its own
for the baselines, fitted on the training split of its difficulty (`trace-jax fit-rules --evaluation.set NAME`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from trace_jax.config import ConfigError, RunConfig, SimulatorConfig


@dataclass(frozen=True)
class HeldOut:
    """How a set is made: the world, seed and number of its episodes, and the rules fitted for it (`rules.BUNDLED`)."""

    simulator: SimulatorConfig
    seed: int
    episodes: int
    rules: str


SETS: Mapping[str, HeldOut] = {
    "hard": HeldOut(
        SimulatorConfig(difficulty="hard", strength=0.6, verified=False),
        seed=2609,
        episodes=470,
        rules="hard",
    ),
}


def applied(config: RunConfig) -> RunConfig:
    """The configuration with the world, seed, size and rules of the set that it names; as it is if it names none.

    Raises:
        ConfigError: the environment is not that of the sets.
    """
    if not config.evaluation.set:
        return config
    if config.environment.name != "ads":
        raise ConfigError(f"`evaluation.set` {config.evaluation.set} is of `environment.name` ads: leave it out")
    chosen = SETS[config.evaluation.set]
    simulator = dataclasses.replace(chosen.simulator, batch=config.simulator.batch)
    data = dataclasses.replace(config.data, seed=chosen.seed, test=chosen.episodes, curriculum=())
    own = config.evaluation.rules or chosen.rules
    return config.replace(simulator=simulator, data=data, evaluation=dataclasses.replace(config.evaluation, rules=own))
