"""Benign movements, present whether or not something is wrong. The list grows by one entry in `CONFOUNDERS`.

A confounder acts on what the advertiser's campaigns share (season), on one slice of the campaign, on its budget, on its
weights, or on what the export shows of the truth (late conversions, missing days). None of them is a root cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trace_jax.simulator import draws
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, DRIVER_ATTRIBUTES

WEEK = 7
_CODES = tuple(ATTRIBUTE_NAMES.index(a) for a in DRIVER_ATTRIBUTES)


@chex.dataclass(frozen=True)
class Context:
    """What a confounder may look at. Axes: T days, G segments, A attributes."""

    start_day: Int[Array, ""]
    day: Int[Array, " T"]
    segment_values: Int[Array, "G A"]
    weights: Float[Array, " G"]


@chex.dataclass(frozen=True)
class Confounding:
    """Sum of all confounders. Log effects; "shared" ones hold for the sibling campaigns, too."""

    volume: Float[Array, " T"]  # shared, log eta
    rates: Float[Array, "3 T"]  # shared: CTR, CVR, CPC
    slice_rates: Float[Array, "3 T"]  # of the drifting slice
    slice_inside: Bool[Array, " G"]
    budget: Float[Array, " T"]
    weights: Float[Array, " G"]
    completeness: Float[Array, " T"]  # share of the final orders that the export shows, shared
    day_mask: Bool[Array, " T"]  # days that the export has, shared
    sizes: Float[Array, " C"]  # signed size at the peak, 0 if absent, CONFOUNDER_NAMES order


Parts = Mapping[str, Array]  # fields of Confounding that the confounder changes
Draw = Callable[[draws.Tape, Context, SimulatorParams], tuple[Array, Parts]]


@dataclass(frozen=True)
class Confounder:
    """`draw` returns the signed size (0: absent) and its contributions."""

    name: str
    description: str
    draw: Draw


def _sign(tape: draws.Tape) -> Array:
    return jnp.where(tape.uniform() < 0.5, 1.0, -1.0)


def _span(tape: draws.Tape, context: Context, length: tuple[int, int], probability: Array) -> Float[Array, " T"]:
    """1 on a few consecutive days anywhere in the window if the event takes place, else 0."""
    present = tape.uniform() < probability
    first = tape.integer(0, context.day.shape[0] - 1)
    inside = (context.day >= first) & (context.day < first + tape.integer(*length))
    return jnp.where(present & inside, 1.0, 0.0)


def _only(metric: int, series: Float[Array, " T"]) -> Float[Array, "3 T"]:
    return jnp.zeros((3, series.shape[0])).at[metric].set(series)


def _unit(pattern: Float[Array, " W"]) -> Float[Array, " W"]:
    """Scaled so that its largest deviation is one."""
    return pattern / jnp.maximum(jnp.abs(pattern).max(), 1e-6)


def _weekday(tape: draws.Tape, context: Context, params: SimulatorParams) -> tuple[Array, Parts]:
    size = tape.between(params.weekday_amplitude)
    own, usual = tape.normal((WEEK,)), jnp.stack(params.weekday_shape)
    pattern = params.weekday_own * _unit(own) + (1.0 - params.weekday_own) * _unit(usual)
    pattern = _unit(pattern) * size
    return size, {"volume": pattern[(context.start_day + context.day) % WEEK]}


def _trend(tape: draws.Tape, context: Context, params: SimulatorParams) -> tuple[Array, Parts]:
    size = tape.between(params.trend)
    return size, {"volume": size * (context.day / context.day.shape[0] - 0.5)}


def _promotion(tape: draws.Tape, context: Context, params: SimulatorParams) -> tuple[Array, Parts]:
    span = _span(tape, context, params.promotion_days, params.promotion_probability)
    volume, cvr = tape.between(params.promotion_volume), tape.between(params.promotion_cvr)
    return volume * span.max(), {"volume": span * volume, "rates": _only(1, span * cvr)}


def _holiday(tape: draws.Tape, context: Context, params: SimulatorParams) -> tuple[Array, Parts]:
    span = _span(tape, context, params.holiday_days, params.holiday_probability)
    volume, cvr = tape.between(params.holiday_volume), tape.between(params.holiday_cvr)
    return -volume * span.max(), {"volume": -span * volume, "rates": _only(1, -span * cvr)}


def _drift(tape: draws.Tape, context: Context, params: SimulatorParams) -> tuple[Array, Parts]:
    """One rate moves a little over the intervention window in the segments of one attribute value, but for those in
    which something is really wrong."""
    attribute = jnp.array(_CODES)[tape.integer(0, len(_CODES) - 1)]
    segment = jnp.argmax(jnp.log(context.weights + 1e-20) + tape.gumbel(context.weights.shape))
    value = context.segment_values[segment, attribute]
    present = tape.uniform() < params.drift_probability
    size = jnp.where(present, _sign(tape) * tape.between(params.drift), 0.0)
    half = context.day.shape[0] // 2
    ramp = jnp.clip((context.day - half + 1) / half, 0.0, 1.0)
    metric = jax.nn.one_hot(tape.integer(0, 2), 3)
    inside = context.segment_values[:, attribute] == value
    return size, {"slice_rates": metric[:, None] * size * ramp, "slice_inside": inside}


def _step(tape: draws.Tape, context: Context) -> Float[Array, " T"]:
    """0 before a day near the middle of the window, 1 from then on: as suspicious as a benign change can be."""
    days = context.day.shape[0]
    first = days // 2 + tape.integer(-(days // 8), days // 8)
    return jnp.where(context.day >= first, 1.0, 0.0)


def _budget_change(tape: draws.Tape, context: Context, params: SimulatorParams) -> tuple[Array, Parts]:
    """The budget is raised, or trimmed by less than the headroom: nothing else moves."""
    present = tape.uniform() < params.budget_change_probability
    up = tape.uniform() < 0.6
    raised, trimmed = tape.between(params.budget_change), -0.3 * tape.between(params.budget_change)
    size = jnp.where(present, jnp.where(up, raised, trimmed), 0.0)
    return size, {"budget": size * _step(tape, context)}


def _market_move(tape: draws.Tape, context: Context, params: SimulatorParams) -> tuple[Array, Parts]:
    """Demand and prices move for every campaign of the advertiser at once."""
    present = tape.uniform() < params.market_move_probability
    size = jnp.where(present, _sign(tape) * tape.between(params.market_move_volume), 0.0)
    rates = _sign(tape) * tape.between(params.market_move_rate)
    metric = jax.nn.one_hot(tape.integer(0, 2), 3)
    step = _step(tape, context)
    moved = jnp.where(present, rates, 0.0) * metric[:, None] * step
    return size, {"volume": size * step, "rates": moved}


def _late_conversions(tape: draws.Tape, context: Context, params: SimulatorParams) -> tuple[Array, Parts]:
    """Orders of the last days are still being attributed when the tables are exported."""
    present = tape.uniform() < params.late_conversions_probability
    lag = tape.integer(*params.late_conversions_days)
    first = tape.between(params.late_conversions_first)
    age = context.day.shape[0] - 1 - context.day
    known = jnp.clip(first + (1.0 - first) * age / lag, 0.0, 1.0)
    return jnp.where(present, jnp.log(first), 0.0), {"completeness": jnp.where(present, known, 1.0)}


def _missing_days(tape: draws.Tape, context: Context, params: SimulatorParams) -> tuple[Array, Parts]:
    """The export lacks one or two inner days, for all campaigns (the first and last day stand)."""
    present = tape.uniform() < params.missing_days_probability
    first = tape.integer(1, context.day.shape[0] - 3)
    length = tape.integer(*params.missing_days)
    inner = (context.day >= first) & (context.day < first + length) & (context.day < context.day.shape[0] - 1)
    return jnp.where(present, -length * 1.0, 0.0), {"day_mask": ~(present & inner)}


def _zero_volume(tape: draws.Tape, context: Context, params: SimulatorParams) -> tuple[Array, Parts]:
    """Some segments have hardly any impressions, as the long tail of every report does."""
    present = tape.uniform() < params.zero_volume_probability
    share = jnp.where(present, tape.between(params.zero_volume_share), 0.0)
    empty = tape.uniform(context.weights.shape) < share
    return share, {"weights": jnp.where(empty, -8.0, 0.0)}


CONFOUNDERS: tuple[Confounder, ...] = (
    Confounder("weekday", "weekly cycle of volume", _weekday),
    Confounder("trend", "slow growth or decline of volume", _trend),
    Confounder("promotion", "a few days of more volume and better CVR", _promotion),
    Confounder("holiday", "a few days of less volume and worse CVR", _holiday),
    Confounder("drift", "one rate of one unrelated slice drifts", _drift),
    Confounder("budget_change", "the budget changes without ever being used up", _budget_change),
    Confounder("market_move", "volume and a rate move for all campaigns of the advertiser", _market_move),
    Confounder("late_conversions", "the last days' orders are not complete yet", _late_conversions),
    Confounder("missing_days", "one or two days are missing from the export", _missing_days),
    Confounder("zero_volume", "segments with hardly any impressions", _zero_volume),
)
CONFOUNDER_NAMES: tuple[str, ...] = tuple(c.name for c in CONFOUNDERS)
_COMBINE = {"completeness": jnp.multiply, "day_mask": jnp.logical_and, "slice_inside": jnp.logical_or}


def draw_confounding(tape: draws.Tape, context: Context, params: SimulatorParams) -> Confounding:
    """Draw every confounder of the list and add up what they do, on top of the season's daily shocks. Log effects add;
    completeness multiplies; a missing day is missing whoever drops it."""
    days, segments = context.day.shape[0], context.weights.shape[0]
    total: dict[str, Array] = {
        "volume": params.season_day_cv * tape.normal((days,)),
        "rates": jnp.zeros((3, days)),
        "slice_rates": jnp.zeros((3, days)),
        "slice_inside": jnp.zeros(segments, bool),
        "budget": jnp.zeros(days),
        "weights": jnp.zeros(segments),
        "completeness": jnp.ones(days),
        "day_mask": jnp.ones(days, bool),
    }
    sizes = []
    for confounder in CONFOUNDERS:
        size, parts = confounder.draw(tape, context, params)
        sizes.append(size)
        for name, value in parts.items():
            total[name] = _COMBINE.get(name, jnp.add)(total[name], value)
    return Confounding(sizes=jnp.stack(sizes), **total)
