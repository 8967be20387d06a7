"""Which values and combinations of a `RunConfig` are refused before anything runs."""

from __future__ import annotations

from functools import reduce
from typing import Any

from trace_jax.config import ConfigError, RunConfig

CHOICES: dict[str, tuple[str, ...]] = {
    "environment.prompt": ("compact", "full"),
    "policy.dtype": ("float32", "bfloat16"),
    "rollout.cache_dtype": ("float32", "bfloat16"),
    "sft.optimizer.schedule": ("constant", "cosine"),
    "grpo.optimizer.schedule": ("constant", "cosine"),
    "grpo.objective": ("grpo", "dr_grpo", "dapo"),
    "grpo.aggregation": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant"),
}

# (smallest, largest) allowed value; None leaves that side open. A lower bound written as "> 0" excludes zero itself.
_OPTIMIZER = {
    "learning_rate": (">0", None),
    "warmup_steps": (0, None),
    "final_fraction": (0, 1),
    "b1": (0, 0.9999999),
    "b2": (0, 0.9999999),
    "eps": (">0", None),
    "weight_decay": (0, None),
    "clip_norm": (">0", None),
}
RANGES: dict[str, tuple[Any, Any]] = {
    "seed": (0, 2**31 - 1),
    "simulator.days": (8, 366),
    "simulator.segments": (4, 4096),
    "simulator.siblings": (0, 64),
    "simulator.batch": (1, None),
    "data.seed": (0, 2**31 - 1),
    "data.train": (1, None),
    "data.validation": (1, None),
    "data.test": (1, None),
    "environment.tool_seconds": (">0", None),
    "environment.tool_characters": (80, None),
    "environment.memory_limit_mb": (16, None),
    "environment.reward_attr": (0, 1),
    "environment.reward_full": (0, 1),
    "environment.reward_format": (0, 1),
    "tokenizer.vocab_size": (300, 32000),
    "tokenizer.transcripts": (1, None),
    "tokenizer.fragments": (0, None),
    "tokenizer.min_fragment_characters": (2, None),
    "policy.layers": (1, None),
    "policy.width": (8, None),
    "policy.heads": (1, None),
    "policy.kv_heads": (1, None),
    "policy.head_dim": (2, None),
    "policy.mlp_width": (1, None),
    "policy.rope_theta": (">0", None),
    "policy.norm_eps": (">0", None),
    "policy.max_length": (16, None),
    "rollout.temperature": (">0", None),
    "rollout.max_turns": (2, None),
    "rollout.max_turn_tokens": (2, None),
    "rollout.context": (16, None),
    "rollout.slots": (1, None),
    "rollout.tool_workers": (1, None),
    "rollout.trajectory_seconds": (">0", None),
    "sft.trajectories": (1, None),
    "sft.epochs": (1, None),
    "sft.batch": (1, None),
    "sft.teacher_workers": (1, None),
    "sft.save_every": (1, None),
    "sft.microbatch.row_length": (16, None),
    "sft.microbatch.rows": (1, None),
    "grpo.steps": (0, None),
    "grpo.prompts": (1, None),
    "grpo.group": (2, None),
    "grpo.iterations": (1, None),
    "grpo.clip_low": (0, 1),
    "grpo.clip_high": (0, None),
    "grpo.aggregation_constant": (">0", None),
    "grpo.kl_coefficient": (0, None),
    "grpo.entropy_coefficient": (0, None),
    "grpo.no_signal_share": (0, 1),
    "grpo.microbatch.row_length": (16, None),
    "grpo.microbatch.rows": (1, None),
    "grpo.validate_every": (1, None),
    "grpo.validation_episodes": (0, None),
    "grpo.save_every": (1, None),
    "evaluation.samples": (1, None),
    "evaluation.temperature": (0, None),
    "evaluation.bootstrap": (1, None),
    "evaluation.confidence": (0.5, 0.9999),
    "mesh.fsdp": (1, None),
    "mesh.tensor": (1, None),
    "mesh.expert": (1, None),
    "keep_checkpoints": (1, None),
} | {f"{stage}.optimizer.{k}": v for stage in ("sft", "grpo") for k, v in _OPTIMIZER.items()}


def get(config: RunConfig, name: str) -> Any:
    """Value of a dotted field name."""
    return reduce(getattr, name.split("."), config)


def validate(config: RunConfig) -> None:
    """Refuses values out of range and combinations that cannot run or would quietly spoil the run.

    Raises:
        ConfigError: names the field, its value and the mend.
    """
    if not config.name or any(c in config.name for c in "/\\\0"):
        raise ConfigError(f"`name` is `{config.name}`: give a name without slashes, it becomes part of a path")
    for name, allowed in CHOICES.items():
        if get(config, name) not in allowed:
            raise ConfigError(f"`{name}` is `{get(config, name)}`: choose one of {', '.join(allowed)}")
    for name, (low, high) in RANGES.items():
        value = get(config, name)
        too_low = value <= 0 if low == ">0" else low is not None and value < low
        if too_low or (high is not None and value > high):
            bounds = (
                f"above 0{f' and at most {high}' if high is not None else ''}" if low == ">0" else _bounds(low, high)
            )
            raise ConfigError(f"`{name}` is {value}: it must be {bounds}")
    _combinations(config)


def _bounds(low: Any, high: Any) -> str:
    if low == ">0":
        return "above 0"
    return f"at least {low}" if high is None else f"between {low} and {high}"


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ConfigError(message)


def _combinations(c: RunConfig) -> None:
    _refuse(c.simulator.days % 2 == 1, f"`simulator.days` is {c.simulator.days}: use an even number")
    _refuse(c.mesh.data == 0 or c.mesh.data < -1, f"`mesh.data` is {c.mesh.data}: use -1 (all devices) or at least 1")
    _refuse(
        c.policy.heads % c.policy.kv_heads != 0,
        f"`policy.heads` ({c.policy.heads}) must be a multiple of `policy.kv_heads` ({c.policy.kv_heads})",
    )
    _refuse(c.policy.head_dim % 2 == 1, f"`policy.head_dim` is {c.policy.head_dim}: use an even number")
    _refuse(
        c.rollout.context > c.policy.max_length,
        f"`rollout.context` ({c.rollout.context}) exceeds `policy.max_length` ({c.policy.max_length})",
    )
    _refuse(
        c.rollout.max_turn_tokens >= c.rollout.context,
        f"`rollout.max_turn_tokens` ({c.rollout.max_turn_tokens}) leaves no room for a prompt in "
        f"`rollout.context` ({c.rollout.context})",
    )
    for stage in ("sft", "grpo"):
        row = get(c, f"{stage}.microbatch.row_length")
        _refuse(
            row < c.rollout.context,
            f"`{stage}.microbatch.row_length` ({row}) is below `rollout.context` ({c.rollout.context}): "
            "long trajectories would be cut, raise it",
        )
    total = c.environment.reward_attr + c.environment.reward_full + c.environment.reward_format
    _refuse(total <= 0, "`environment.reward_*` are all 0: nothing to learn from, give one a positive weight")
    _refuse(
        c.grpo.validation_episodes > c.data.validation,
        f"`grpo.validation_episodes` ({c.grpo.validation_episodes}) exceeds `data.validation` ({c.data.validation})",
    )
    _refuse(
        c.grpo.prompts > c.data.train,
        f"`grpo.prompts` ({c.grpo.prompts}) exceeds `data.train` ({c.data.train}): one step would repeat a prompt",
    )
    _refuse(
        c.sft.batch > c.sft.trajectories,
        f"`sft.batch` ({c.sft.batch}) exceeds `sft.trajectories` ({c.sft.trajectories}): there would be no step",
    )
    _refuse(
        c.evaluation.temperature == 0 and c.evaluation.samples > 1,
        "`evaluation.temperature` is 0: all samples would be the same answer, set `evaluation.samples` to 1",
    )
