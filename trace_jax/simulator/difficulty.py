"""How hard the episodes are: presets by name and knobs, as `SimulatorParams` of one compiled program."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from trace_jax.config import ConfigError, SimulatorConfig
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.vocabulary import PROFILES

# Multipliers of the knobs, and fields that a preset sets outright.
PRESETS: dict[str, dict[str, Any]] = {
    "easy": {
        "strength": 1.25,
        "noise": 0.7,
        "confounders": 0.5,
        "confounder_strength": 0.6,
        "onset": (2.0, 1.0, 1.0),
    },
    "paper": {},
    "hard": {
        "strength": 0.8,
        "noise": 1.3,
        "confounders": 1.5,
        "confounder_strength": 1.4,
        "onset": (0.5, 1.0, 1.5),
        "late_conversions_probability": 0.25,
        "missing_days_probability": 0.25,
    },
}
KNOBS = ("strength", "noise", "confounders", "confounder_strength")


def _times(value: Any, factor: float, probability: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(round(v * factor, 9) for v in value)
    return round(min(value * factor, 1.0) if probability else value * factor, 9)


def params_of(config: SimulatorConfig) -> SimulatorParams:
    """The magnitudes that a configuration asks for: the preset `config.difficulty`, times the knobs.

    Raises:
        ConfigError: there is no such preset.
    """
    preset = PRESETS.get(config.difficulty)
    if preset is None:
        raise ConfigError(f"simulator.difficulty: {config.difficulty!r} is none of {', '.join(PRESETS)}")
    base = SimulatorParams()
    changed: dict[str, Any] = {k: v for k, v in preset.items() if k not in KNOBS and k != "onset"}
    factors = {k: preset.get(k, 1.0) * getattr(config, k) for k in KNOBS}
    for field in dataclasses.fields(SimulatorParams):
        knob = field.metadata.get("scaled_by")
        if knob is not None:
            # What a preset sets outright is meant as it stands; only the configuration's own knob multiplies it.
            factor = getattr(config, knob) if field.name in preset else factors[knob]
            value = changed.get(field.name, getattr(base, field.name))
            changed[field.name] = _times(value, factor, field.name.endswith("_probability"))
    weights = np.array(config.onset) * np.array(preset.get("onset", (1.0,) * len(PROFILES)))
    return base.replace(
        effects=base.effects * np.float32(factors["strength"]), onset=tuple(weights.tolist()), **changed
    )
