"""Which policies, adapters and chat settings are refused before anything runs."""

from __future__ import annotations

import dataclasses
from itertools import cycle, islice
from typing import Any

from trace_jax.config import ConfigError, PolicyConfig, RunConfig

ATTENTION, DELTA = MIXERS = ("attention", "delta")

CHOICES: dict[str, tuple[str, ...]] = {
    "policy.dtype": ("float32", "bfloat16"),
    "policy.param_dtype": ("float32", "bfloat16"),
    "policy.remat": ("none", "dots", "full"),
    "chat.thinking": ("off", "keep"),
    "chat.tool_format": ("auto", "json", "xml"),
}

_HEADS, _WIDTH = (1, 1024), (8, 65536)
RANGES: dict[str, tuple[Any, float]] = {
    "policy.vocab_size": (0, 2**24),
    "policy.layers": (1, 512),
    "policy.width": _WIDTH,
    "policy.heads": _HEADS,
    "policy.kv_heads": _HEADS,
    "policy.head_dim": (2, 1024),
    "policy.mlp_width": (0, 2**18),
    "policy.rope_theta": (">0", 1e12),
    "policy.norm_eps": (">0", 1e-2),
    "policy.rotary_fraction": (">0", 1),
    "policy.delta_key_heads": (0, 1024),
    "policy.delta_value_heads": (0, 1024),
    "policy.delta_key_dim": (0, 1024),
    "policy.delta_value_dim": (0, 1024),
    "policy.conv_width": (2, 64),
    "policy.experts": (0, 4096),
    "policy.experts_per_token": (0, 4096),
    "policy.expert_width": (0, 2**18),
    "policy.shared_expert_width": (0, 2**18),
    "policy.max_length": (16, 2**21),
    "lora.rank": (0, 4096),
    "lora.alpha": (">0", 1e6),
}
# Fields of a policy that say what its parameters mean; the others may differ between runs that share them.
SHAPE = tuple(
    field.name
    for field in dataclasses.fields(PolicyConfig)
    if field.name not in ("dtype", "param_dtype", "remat", "max_length")
)
_DELTA_SIZES = ("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim")
_EXPERT_SIZES = ("experts_per_token", "expert_width")


def mixers(policy: PolicyConfig) -> tuple[str, ...]:
    """What mixes tokens in each layer."""
    return tuple(islice(cycle(policy.mixers), policy.layers))


def rotated(policy: PolicyConfig) -> int:
    """Width of a head that rotary positions turn."""
    return int(policy.head_dim * policy.rotary_fraction)


def parameters(policy: PolicyConfig, vocab_size: int, active: bool = False) -> int:
    """Number of parameters of a policy.

    Args:
        active: count of the experts only those that one token has.
    """
    p, kinds = policy, mixers(policy)
    query, kv = p.heads * p.head_dim, p.kv_heads * p.head_dim
    attention = p.width * ((2 + p.attention_gate) * query + 2 * kv) + 2 * p.head_dim * p.qk_norm
    key, value = p.delta_key_heads * p.delta_key_dim, p.delta_value_heads * p.delta_value_dim
    delta = p.width * (2 * key + 3 * value + 2 * p.delta_value_heads) + p.conv_width * (2 * key + value)
    delta += 2 * p.delta_value_heads + p.delta_value_dim
    if p.experts:
        count = p.experts_per_token if active else p.experts
        feed = p.width * (p.experts + 3 * count * p.expert_width + 3 * p.shared_expert_width)
        feed += p.width * (p.shared_expert_width > 0)
    else:
        feed = 3 * p.width * p.mlp_width
    layers = kinds.count(ATTENTION) * attention + kinds.count(DELTA) * delta + p.layers * (feed + 2 * p.width)
    return layers + p.width * (1 + vocab_size * (1 if p.tie_embeddings else 2))


def check(c: RunConfig) -> None:
    """Refuses combinations.

    Raises:
        ConfigError: one line that names the field and the mend.
    """
    check_policy(c.policy)
    _refuse(
        c.policy.param_dtype != "float32" and not c.lora.rank,
        "`policy.param_dtype` bfloat16 would lose small updates: use float32, or train adapters (`lora.rank`)",
    )
    _refuse(
        c.rollout.replay_routes and not c.policy.experts,
        "`rollout.replay_routes` needs a policy with `policy.experts`: leave it out",
    )
    _refuse(not c.lora.targets, "`lora.targets` is empty: name the parameters that have an adapter")
    twice = [name for i, name in enumerate(c.lora.targets) if name in c.lora.targets[:i]]
    _refuse(bool(twice), f"`lora.targets` has {', '.join(f'`{name}`' for name in twice[:1])} twice: leave one out")
    for name in c.lora.targets:
        known = targets(c.policy)
        _refuse(
            bool(c.lora.rank) and name not in known,
            f"`lora.targets` has `{name}`, which this policy lacks: choose from {', '.join(known)}",
        )
    if c.lora.gate:
        _gate(c)


def _gate(c: RunConfig) -> None:
    _refuse(not c.lora.rank, "`lora.gate` mixes adapters, and `lora.rank` is 0: leave it out")
    experts = [name for name in c.lora.targets if name.startswith("expert_")]
    _refuse(
        bool(experts),
        f"`lora.gate` cannot mix adapters of single experts ({', '.join(experts)}): train adapters of other targets",
    )
    _refuse(
        c.grpo.turn_credit.enabled,
        "`grpo.turn_credit` does not go with `lora.gate`: its questions say no prompt to a gate, switch it off",
    )


def targets(policy: PolicyConfig) -> tuple[str, ...]:
    """Parameters that can have an adapter: every matrix of a layer but those of the router and the small gates."""
    kinds = mixers(policy)
    names: tuple[str, ...] = ()
    if ATTENTION in kinds:
        names += ("query", "key", "value", "output") + ("query_gate",) * policy.attention_gate
    if DELTA in kinds:
        names += ("delta_query", "delta_key", "delta_value", "delta_gate", "delta_output")
    if not policy.experts:
        return (*names, "gate", "up", "down")
    shared = ("shared_gate", "shared_up", "shared_down") if policy.shared_expert_width else ()
    return (*names, "expert_gate", "expert_up", "expert_down", *shared)


def check_policy(p: PolicyConfig) -> None:
    """Refuses sizes that do not fit together.

    Raises:
        ConfigError: one line that names the field and the mend.
    """
    for name, allowed in CHOICES.items():
        section, _, field = name.partition(".")
        if section == "policy":
            value = getattr(p, field)
            _refuse(value not in allowed, f"`{name}` {value!r} is unknown: use one of {', '.join(allowed)}")
    _refuse(
        p.heads % p.kv_heads != 0, f"`policy.heads` ({p.heads}) must be a multiple of `policy.kv_heads` ({p.kv_heads})"
    )
    _refuse(p.head_dim % 2 == 1, f"`policy.head_dim` is {p.head_dim}: use an even number")
    turned = p.head_dim * p.rotary_fraction
    _refuse(
        turned % 2 != 0 or turned < 2,
        f"`policy.rotary_fraction` {p.rotary_fraction} rotates {turned:g} of `policy.head_dim` {p.head_dim}: choose "
        "one that gives an even number",
    )
    _refuse(not p.mixers, "`policy.mixers` is empty: name attention or delta")
    for name in p.mixers:
        _refuse(name not in MIXERS, f"`policy.mixers` has `{name}`: choose from {', '.join(MIXERS)}")
    _refuse(
        ATTENTION not in mixers(p), f"`policy.mixers` gives {p.layers} layers no attention: put it among the first ones"
    )
    delta = DELTA in mixers(p)
    for name in _DELTA_SIZES:
        value = getattr(p, name)
        _refuse(delta and value < 1, f"`policy.{name}` is {value}: layers of `delta` in `policy.mixers` need one")
        _refuse(not delta and value > 0, f"`policy.{name}` is {value} without `delta` in `policy.mixers`: leave it out")
    _refuse(
        delta and p.delta_value_heads % p.delta_key_heads != 0,
        f"`policy.delta_value_heads` ({p.delta_value_heads}) must be a multiple of `policy.delta_key_heads` "
        f"({p.delta_key_heads})",
    )
    for name in _EXPERT_SIZES:
        value = getattr(p, name)
        _refuse(p.experts > 0 and value < 1, f"`policy.{name}` is {value}: `policy.experts` {p.experts} need one")
        _refuse(p.experts == 0 and value > 0, f"`policy.{name}` is {value} without `policy.experts`: leave it out")
    _refuse(
        p.experts == 0 and p.shared_expert_width > 0,
        f"`policy.shared_expert_width` is {p.shared_expert_width} without `policy.experts`: leave it out",
    )
    _refuse(
        p.experts_per_token > p.experts,
        f"`policy.experts_per_token` ({p.experts_per_token}) exceeds `policy.experts` ({p.experts})",
    )
    _refuse(
        p.experts > 0 and p.mlp_width > 0,
        f"`policy.mlp_width` {p.mlp_width} would be ignored beside `policy.experts`: set it to 0",
    )
    _refuse(p.experts == 0 and p.mlp_width < 1, "`policy.mlp_width` is 0: only a policy with `policy.experts` has none")


def outside(value: float, low: Any, high: float) -> str | None:
    """Where a value of a field must be, if it is outside of what `RANGES` says."""
    if not ((value <= 0 if low == ">0" else value < low) or value > high):
        return None
    return f"above 0 and at most {high}" if low == ">0" else f"between {low} and {high}"


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ConfigError(message)
