"""Which fields of a `GRPOConfig` contradict each other. A value that would have no effect is refused, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from trace_jax.config import ConfigError, GRPOConfig, TurnCreditConfig
from trace_jax.learner.aggregation import AGGREGATIONS
from trace_jax.learner.corrections import CORRECTIONS
from trace_jax.learner.divergence import KL_ESTIMATORS
from trace_jax.learner.surrogates import OBJECTIVES

# Ratios of whole sequences stay within a few 1e-4 of 1: a clip made for single tokens would never act on them.
SEQUENCE_CLIP_LIMIT = 0.05

_MASKS = ("mask_tokens", "mask_sequences")
_DEFAULTS = GRPOConfig()
# field, whether a config uses it, why not
_USED: tuple[tuple[str, Callable[[GRPOConfig], bool], str], ...] = (
    (
        "aggregation_constant",
        lambda c: c.aggregation == "seq_sum_constant",
        "only `grpo.aggregation` seq_sum_constant divides by it",
    ),
    (
        "resample_limit",
        lambda c: c.constant_groups == "resample",
        "only `grpo.constant_groups` resample collects again",
    ),
    (
        "correction_low",
        lambda c: c.correction in _MASKS,
        "only `grpo.correction` mask_tokens or mask_sequences has a lower bound",
    ),
    ("correction_high", lambda c: c.correction != "none", "`grpo.correction` is none"),
    ("kl_estimator", lambda c: c.kl_coefficient > 0, "`grpo.kl_coefficient` is 0"),
    ("overlong_penalty", lambda c: c.overlong_buffer > 0, "`grpo.overlong_buffer` is 0"),
    (
        "weight_sync",
        lambda c: c.staleness >= 1,
        "`grpo.staleness` is 0, so nothing is being sampled when parameters change: set it to 1 or more",
    ),
    (
        "dual_clip",
        lambda c: not (c.old_policy == "learner" and c.iterations == 1),
        "`grpo.old_policy` learner with one of `grpo.iterations` leaves every ratio at 1: raise grpo.iterations",
    ),
)


def validate(config: GRPOConfig) -> None:
    """Refuses values and combinations that contradict the named objective or each other, or do nothing.

    Raises:
        ConfigError: naming the field and what to set it to.
    """
    for name, allowed in (
        ("objective", OBJECTIVES),
        ("aggregation", AGGREGATIONS),
        ("correction", CORRECTIONS),
        ("kl_estimator", KL_ESTIMATORS),
    ):
        if getattr(config, name) not in allowed:
            raise ConfigError(f"`grpo.{name}` is `{getattr(config, name)}`: choose one of {', '.join(allowed)}")
    for name, allowed in OBJECTIVES[config.objective].fixes.items():
        value = getattr(config, name)
        if value not in allowed:
            wanted = " or ".join(str(v).lower() for v in allowed)
            raise ConfigError(
                f"`grpo.objective` {config.objective} contradicts `grpo.{name}` {str(value).lower()}: "
                f"set grpo.{name} to {wanted}, or grpo.objective to grpo"
            )
    _clips(config)
    _corrections(config)
    _turn_credit(config)
    if config.aggregation == "seq_sum_constant" and not config.aggregation_constant > 0:
        raise ConfigError(f"`grpo.aggregation_constant` is {config.aggregation_constant}: it must be above 0")
    if config.overlong_buffer > 0 and config.overlong_penalty == 0:
        raise ConfigError(
            f"`grpo.overlong_buffer` is {config.overlong_buffer} with `grpo.overlong_penalty` 0, which takes nothing "
            "from any reward: raise grpo.overlong_penalty (1.0) or set grpo.overlong_buffer to 0"
        )
    for name, used, reason in _USED:
        value, default = getattr(config, name), getattr(_DEFAULTS, name)
        if value != default and not used(config):
            raise ConfigError(f"`grpo.{name}` is {value} without effect: {reason}, or leave it at {default}")


def _clips(c: GRPOConfig) -> None:
    # CISPO without a lower bound is written as 1: a ratio is never below 0
    highest = "at most 1" if c.objective == "cispo" else "below 1"
    if not (0.0 < c.clip_low < 1.0 or (c.objective == "cispo" and c.clip_low == 1.0)):
        raise ConfigError(f"`grpo.clip_low` is {c.clip_low}: it must be above 0 and {highest}")
    if not c.clip_high > 0.0:
        raise ConfigError(f"`grpo.clip_high` is {c.clip_high}: it must be above 0")
    if c.objective == "dapo" and c.clip_high <= c.clip_low:
        raise ConfigError(
            f"`grpo.objective` dapo clips higher above than below, but `grpo.clip_high` {c.clip_high} is not "
            f"above `grpo.clip_low` {c.clip_low}: raise grpo.clip_high (0.28) or set grpo.objective to grpo"
        )
    if OBJECTIVES[c.objective].by_sequence and max(c.clip_low, c.clip_high) > SEQUENCE_CLIP_LIMIT:
        raise ConfigError(
            f"`grpo.objective` {c.objective} clips the ratio of whole sequences, which never gets as far as "
            f"`grpo.clip_low` {c.clip_low} and `grpo.clip_high` {c.clip_high}: set them to 0.0003 and 0.0004"
        )
    if not c.dual_clip:
        return
    if c.objective == "cispo":
        raise ConfigError(
            f"`grpo.dual_clip` is {c.dual_clip}, but `grpo.objective` cispo has no ratio to bound, only a clipped "
            "weight: set grpo.dual_clip to 0"
        )
    if not c.dual_clip > 1.0:
        raise ConfigError(
            f"`grpo.dual_clip` is {c.dual_clip}: up to 1 it would take the gradient of tokens that have not become "
            "likelier, use a value above 1 (3) or 0 for none"
        )


def _corrections(c: GRPOConfig) -> None:
    if c.correction == "none":
        return
    if c.old_policy != "learner":
        raise ConfigError(
            f"`grpo.correction` {c.correction} makes up for the step from sampler to learner, which the ratio already "
            f"has with `grpo.old_policy` {c.old_policy}: set grpo.old_policy to learner or grpo.correction to none"
        )
    if c.correction in _MASKS and not c.correction_low < 1.0 < c.correction_high:
        raise ConfigError(
            f"`grpo.correction` {c.correction} with `grpo.correction_low` {c.correction_low} and "
            f"`grpo.correction_high` {c.correction_high} removes tokens on which sampler and learner agree: put 1 "
            "between the two"
        )


def _turn_credit(c: GRPOConfig) -> None:
    credit, none = c.turn_credit, TurnCreditConfig()
    for field in fields(credit):
        value, default = getattr(credit, field.name), getattr(none, field.name)
        if value != default and not credit.enabled:
            raise ConfigError(
                f"`grpo.turn_credit.{field.name}` is {value} without effect: set grpo.turn_credit.enabled to true, or "
                f"leave it at {default}"
            )
    for name in ("outcome_coefficient", "terminal_fill"):
        value, default = getattr(credit, name), getattr(none, name)
        if value != default and not credit.pays:
            raise ConfigError(
                f"`grpo.turn_credit.{name}` is {value} without effect: with `grpo.turn_credit.coefficient` 0 credit is "
                f"only measured, raise that or leave this at {default}"
            )
    if credit.pays and c.constant_groups == "drop":
        other = "resample" if c.objective == "dapo" else "count"
        raise ConfigError(
            "`grpo.constant_groups` drop contradicts `grpo.turn_credit`, from which such groups learn: set "
            f"grpo.constant_groups to {other}"
        )
    if credit.pays and OBJECTIVES[c.objective].one_advantage:
        raise ConfigError(
            f"`grpo.objective` {c.objective} has one advantage for a whole trajectory, turn credit one for each turn: "
            "set grpo.objective to gspo_token, or grpo.turn_credit.coefficient to 0"
        )
