"""Which values and combinations of a `RunConfig` are refused before anything runs."""

from __future__ import annotations

import dataclasses
import os
import re
import reprlib
from functools import reduce
from typing import Any

from trace_jax import config_rules_policy
from trace_jax.config import ConfigError, RunConfig

CHOICES: dict[str, tuple[str, ...]] = {
    "simulator.rng": ("threefry2x32", "threefry2x32_13"),
    "simulator.difficulty": ("easy", "paper", "hard"),
    "evaluation.set": ("", "hard"),
    "environment.name": ("ads", "search"),
    "environment.prompt": ("compact", "full"),
    **config_rules_policy.CHOICES,
    "rollout.cache_dtype": ("float32", "bfloat16"),
    "rollout.weights": ("compute", "int8"),
    "rollout.stale_cache": ("refill", "keep"),
    "sft.optimizer.schedule": ("constant", "cosine"),
    "grpo.optimizer.schedule": ("constant", "cosine"),
    "grpo.objective": ("grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo"),
    "grpo.baseline": ("mean", "leave_one_out"),
    "grpo.lost_members": ("survivors", "drop_group"),
    "grpo.constant_groups": ("count", "drop", "resample"),
    "grpo.old_policy": ("behaviour", "learner"),
    "grpo.correction": ("none", "truncate", "mask_tokens", "mask_sequences"),
    "grpo.kl_estimator": ("k1", "k2", "k3"),
    "grpo.weight_sync": ("between", "in_flight"),
    "grpo.turn_credit.form": ("log_ratio", "raw_delta", "remaining_gap", "remaining_gap_initial"),
    "capability.labeller": ("programmatic", "endpoint"),
    "capability.rank": ("gap", "explained"),
    "endpoint.protocol": ("tools", "text"),
    "endpoint.tokens_field": ("max_tokens", "max_completion_tokens"),
    "grpo.aggregation": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant"),
}

# Fields that only one environment reads; elsewhere they are refused.
ONLY_OF: dict[str, tuple[str, ...]] = {
    "ads": (
        "simulator",
        "data.curriculum",
        *(f"environment.{name}" for name in ("tool_seconds", "memory_limit_mb", "reward_attr", "reward_full")),
        "environment.penalty_false_cause",
        "grpo.no_signal_share",
        *("sft.without", "sft.searches"),
        *("environment.worlds", "grpo.hints"),
    ),
    "search": ("search",),
}

# What `sft.without` may leave out: lessons of an episode type, or a habit of the teacher.
LESSONS = ("campaign", "mix", "segment_1d", "segment_2d", "no_signal")
WITHOUT = (*LESSONS, "stopping")
SEARCHES = ("scan", "drill", "shallow")  # of the teacher, see `sft.searches`

# Worlds of capabilities, and how far their difficulty goes either way: six levels are an eighth of the effects.
WORLDS = (
    *("tool_protocol", "campaign_comparison", "mix_decomposition", "drill_down", "intersection"),
    *("sibling_causes", "abstaining", "stopping", "evidence"),
)
LEVELS = 6

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")  # becomes part of paths
# A stored run is also read on smaller machines than its own (a report on a laptop), so only what no machine of this
# kind could train is refused here.
MEMORY_FACTOR = 8

_COUNT, _TOKENS = 10**7, 2**21
# (smallest, largest) allowed value. Upper ends are far beyond any use: they catch slips of the keyboard.
# A lower bound written as ">0" excludes zero itself.
_OPTIMIZER = {
    "learning_rate": (">0", 10),
    "warmup_steps": (0, _COUNT),
    "final_fraction": (0, 1),
    "b1": (0, 0.9999999),
    "b2": (0, 0.9999999),
    "eps": (">0", 1),
    "weight_decay": (0, 100),
    "clip_norm": (">0", 1e6),
}
RANGES: dict[str, tuple[Any, float]] = {
    "seed": (0, 2**31 - 1),
    "simulator.days": (8, 366),
    "simulator.segments": (4, 108),
    "simulator.siblings": (0, 64),
    "simulator.batch": (1, 10**6),
    "simulator.strength": (0, 10),
    "simulator.noise": (0, 10),
    "simulator.confounders": (0, 10),
    "simulator.confounder_strength": (0, 10),
    "simulator.two_attribute_share": (0, 1),
    "data.seed": (0, 2**31 - 1),
    "data.train": (1, _COUNT),
    "data.validation": (1, _COUNT),
    "data.test": (1, _COUNT),
    "environment.tool_seconds": (">0", 86400),
    "environment.tool_characters": (80, 10**7),
    "environment.memory_limit_mb": (16, 2**20),
    "environment.reward_attr": (0, 1),
    "environment.reward_full": (0, 1),
    "environment.reward_format": (0, 1),
    "environment.penalty_false_cause": (0, 10),
    "search.documents": (16, 128),
    "search.min_hops": (1, 5),
    "search.max_hops": (1, 5),
    "search.results": (1, 10),
    "search.demonstrations": (0, 1),
    "tokenizer.vocab_size": (300, 32000),
    "tokenizer.transcripts": (1, _COUNT),
    "tokenizer.fragments": (0, 32000),
    "tokenizer.min_fragment_characters": (2, 1000),
    **config_rules_policy.RANGES,
    "rollout.temperature": (">0", 100),
    "rollout.top_k": (0, 128),
    "rollout.top_p": (">0", 1),
    "rollout.min_p": (0, 1),
    "rollout.max_turns": (2, 1000),
    "rollout.max_turn_tokens": (2, _TOKENS),
    "rollout.context": (16, _TOKENS),
    "rollout.slots": (1, 65536),
    "rollout.decode_steps": (1, _TOKENS),
    "rollout.tool_workers": (1, 1024),
    "rollout.tool_queue_seconds": (">0", 604800),
    "rollout.trajectory_seconds": (">0", 604800),
    "sft.trajectories": (1, _COUNT),
    "sft.epochs": (1, 10**4),
    "sft.batch": (1, 10**6),
    "sft.teacher_workers": (1, 1024),
    "sft.save_every": (1, _COUNT),
    "sft.microbatch.row_length": (16, _TOKENS),
    "sft.microbatch.rows": (1, 65536),
    "grpo.steps": (0, _COUNT),
    "grpo.prompts": (1, 10**6),
    "grpo.group": (2, 65536),
    "grpo.iterations": (1, 1000),
    "grpo.hints": (0, 0.5),
    "grpo.clip_low": (0, 1),
    "grpo.clip_high": (0, 1e6),
    "grpo.resample_limit": (1, 1000),
    "grpo.dual_clip": (0, 1e6),
    "grpo.correction_low": (0, 1),
    "grpo.correction_high": (1, 1e6),
    "grpo.aggregation_constant": (">0", 1e9),
    "grpo.overlong_buffer": (0, _TOKENS),
    "grpo.overlong_penalty": (0, 1e6),
    "grpo.staleness": (0, 16),
    "grpo.kl_coefficient": (0, 1000),
    "grpo.entropy_coefficient": (0, 1000),
    "grpo.no_signal_share": (0, 1),
    "grpo.turn_credit.look_ahead": (1, 1000),
    "grpo.turn_credit.discount": (">0", 1),
    "grpo.turn_credit.terminal_fill": (0, 1000),
    "grpo.turn_credit.coefficient": (0, 1000),
    "grpo.turn_credit.outcome_coefficient": (0, 1000),
    "grpo.turn_credit.epsilon": (">0", 100),
    "grpo.turn_credit.microbatch.row_length": (16, _TOKENS),
    "grpo.turn_credit.microbatch.rows": (1, 65536),
    "grpo.microbatch.row_length": (16, _TOKENS),
    "grpo.microbatch.rows": (1, 65536),
    "grpo.validate_every": (1, _COUNT),
    "grpo.validation_episodes": (0, _COUNT),
    "grpo.validation_samples": (1, 10**4),
    "grpo.save_every": (1, _COUNT),
    "grpo.keep_best": (0, 1000),
    "evaluation.samples": (1, 10**4),
    "evaluation.temperature": (0, 100),
    "evaluation.top_k": (0, 1024),
    "evaluation.top_p": (">0", 1),
    "evaluation.min_p": (0, 1),
    "evaluation.bootstrap": (1, 10**5),
    "evaluation.confidence": (0.5, 0.9999),
    **{f"capability.{n}": (1, 1000) for n in ("runs", "keep")},
    **{f"capability.{n}": (0, 1) for n in ("coverage", "gap")},
    "capability.temperature": (0, 100),
    **{f"endpoint.{n}": (1, _COUNT) for n in ("max_turns", "max_turn_tokens", "context")},
    **{f"endpoint.{n}": (0, 1e6) for n in ("price_in", "price_out")},
    **{f"{s}.timeout_seconds": (">0", 86400) for s in ("capability", "endpoint")},
    **{f"{s}.retries": (0, 100) for s in ("capability", "endpoint")},
    **{f"{s}.workers": (1, 256) for s in ("capability", "endpoint")},
    "mesh.fsdp": (1, 65536),
    "mesh.tensor": (1, 65536),
    "mesh.expert": (1, 65536),
    "mesh.rollout_devices": (0, 65536),
    "mesh.rollout_tensor": (1, 65536),
    "mesh.rollout_expert": (1, 65536),
    "keep_checkpoints": (1, 10**6),
} | {f"{stage}.optimizer.{k}": v for stage in ("sft", "grpo") for k, v in _OPTIMIZER.items()}


def get(config: RunConfig, name: str) -> Any:
    """Value of a dotted field name."""
    return reduce(getattr, name.split("."), config)


def validate(config: RunConfig) -> None:
    """Refuses values out of range and combinations that cannot run or would quietly spoil the run.

    Raises:
        ConfigError: names the field, its value and the mend.
    """
    if not _NAME.fullmatch(config.name):
        raise ConfigError(
            f"`name` is `{shown(config.name)}`: it names a path, use up to 100 letters, digits, `.`, `_` and `-`, "
            "the first a letter, digit or `_`"
        )
    for name, allowed in CHOICES.items():
        if get(config, name) not in allowed:
            raise ConfigError(f"`{name}` is `{shown(get(config, name))}`: choose one of {', '.join(allowed)}")
    for name, (low, high) in RANGES.items():
        value = get(config, name)
        if bounds := config_rules_policy.outside(value, low, high):
            raise ConfigError(f"`{name}` is {shown(value)}: it must be {bounds}")
    _environment(config)
    _combinations(config)
    _memory(config)


def shown(value: Any) -> str:
    """A value as it stands in a message: one line, and short whatever it is."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print very long ones
        return "a number of about 10^" + str(int(value.bit_length() * 0.30103))
    text = value if isinstance(value, str) else _REPR.repr(value) if isinstance(value, list | dict) else str(value)
    text = " ".join(text[:200].split())
    return text if len(text) <= 60 else text[:57] + "..."


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict = 2, 3, 3


def _memory(c: RunConfig) -> None:
    """Refuses a policy whose training state (float32 parameters, two Adam moments) no machine like this holds."""
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a system that says
        return
    count = config_rules_policy.parameters(c.policy, c.policy.vocab_size or c.tokenizer.vocab_size)
    # float32 parameters and two moments, or the frozen base of adapters
    size = 12 if not c.lora.rank else 2 if c.policy.param_dtype == "bfloat16" else 4
    share = size * count / (c.mesh.fsdp * c.mesh.tensor * c.mesh.expert)  # bytes on one device
    _refuse(
        share > MEMORY_FACTOR * machine,
        f"`policy` has {count / 1e9:.3g} billion parameters, {share / 2**30:.3g} GiB a device"
        f"{'' if c.lora.rank else ' with their Adam moments'}, "
        f"and this machine has {machine / 2**30:.3g} GiB: lower `policy.layers`, `policy.width` or `policy.mlp_width`",
    )


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ConfigError(message)


def _environment(c: RunConfig) -> None:
    """Refuses fields of another environment than the run's, which would be ignored."""
    for name, sections in ONLY_OF.items():
        for section in sections if name != c.environment.name else ():
            value, default = get(c, section), get(RunConfig(), section)
            if value == default:
                continue
            inner = vars(default) if dataclasses.is_dataclass(default) else {}
            field = next((f"{section}.{k}" for k, v in inner.items() if getattr(value, k) != v), section)
            raise ConfigError(
                f"`{field}` belongs to `environment.name` {name} and would be ignored in {c.environment.name}: "
                "leave it out"
            )
    _refuse(
        c.environment.name == "search" and c.environment.reward_format >= 1,
        "`environment.reward_format` 1 pays every answer that can be read alike, right or wrong: lower it",
    )
    _refuse(
        c.search.min_hops > c.search.max_hops,
        f"`search.min_hops` ({c.search.min_hops}) exceeds `search.max_hops` ({c.search.max_hops}): lower it",
    )


def _capability(c: RunConfig) -> None:
    found = c.capability
    _refuse(
        found.keep > found.runs,
        f"`capability.keep` ({found.keep}) exceeds `capability.runs` ({found.runs}): nothing could be kept, lower it",
    )
    asked = found.labeller == "endpoint"
    for name in ("endpoint", "model"):
        value = getattr(found, name)
        _refuse(asked and not value, f"`capability.labeller` endpoint needs `capability.{name}`: set it")
        _refuse(
            bool(value) and not asked,
            f"`capability.{name}` is `{shown(value)}`, but labels are computed: set `capability.labeller` to endpoint",
        )
    for name, url in (("capability.endpoint", found.endpoint), ("endpoint.url", c.endpoint.url)):
        _refuse(
            bool(url) and not re.match(r"https?://[^\s/]+", url),
            f"`{name}` is `{shown(url)}`: give a URL that begins with http:// or https://",
        )


def require_environment(config: RunConfig, name: str, what: str) -> None:
    """Refuses a run of another environment.

    Args:
        what: needs the environment `name`, for the message.

    Raises:
        ConfigError: one line.
    """
    found = config.environment.name
    if found != name:
        raise ConfigError(f"`{what}` works on `environment.name` {name} only, and this configuration has {found}")


def _combinations(c: RunConfig) -> None:
    _refuse(c.simulator.days % 2 == 1, f"`simulator.days` is {c.simulator.days}: use an even number")
    _refuse(
        len(c.simulator.onset) != 3,
        f"`simulator.onset` is {shown(list(c.simulator.onset))}: give three weights, of immediate, delayed and ramp",
    )
    for name in c.data.curriculum:
        allowed = CHOICES["simulator.difficulty"]
        _refuse(name not in allowed, f"`data.curriculum` has `{shown(name)}`: choose from {', '.join(allowed)}")
    for text in c.environment.worlds:
        name, _, level = text.partition("@")
        _refuse(name not in WORLDS, f"`environment.worlds` has `{shown(text)}`: choose from {', '.join(WORLDS)}")
        _refuse(
            "@" in text and not (re.fullmatch(r"[-+]?\d+(\.\d+)?", level) and abs(float(level)) <= LEVELS),
            f"`environment.worlds` has `{shown(text)}`: give a level from -{LEVELS} to {LEVELS}, such as {name}@1.5",
        )
    _refuse(
        c.grpo.hints > 0 and not c.environment.worlds,
        "`grpo.hints`: only worlds have hints, name some with `environment.worlds`",
    )
    _refuse(
        c.grpo.hints > 0 and c.rollout.replay_routes,
        "`grpo.hints` and `rollout.replay_routes` exclude each other: experts chosen with a hint are not those without",
    )
    for name in c.sft.without:
        _refuse(name not in WITHOUT, f"`sft.without` has `{shown(name)}`: choose from {', '.join(WITHOUT)}")
    for name in c.sft.searches:
        _refuse(name not in SEARCHES, f"`sft.searches` has `{shown(name)}`: choose from {', '.join(SEARCHES)}")
    _refuse(
        not c.sft.searches, f"`sft.searches` leaves the teacher no way to search: name one of {', '.join(SEARCHES)}"
    )
    _refuse(set(LESSONS) <= set(c.sft.without), "`sft.without` leaves no type of lesson: leave one out of it")
    _refuse(
        c.grpo.no_signal_share > 0
        and c.grpo.steps > 0
        and c.grpo.no_signal_share * c.grpo.prompts * c.grpo.steps < 0.5,
        f"`grpo.no_signal_share` {c.grpo.no_signal_share:g} of {c.grpo.prompts} prompts comes to none in "
        f"{c.grpo.steps} steps: raise it or leave it out",
    )
    stages = max(len(c.data.curriculum), 1)
    _refuse(
        stages > 1 and c.grpo.prompts > c.data.train // stages,
        f"`grpo.prompts` ({c.grpo.prompts}) exceeds a stage of `data.curriculum` ({c.data.train} episodes in {stages} "
        "stages): lower it or raise `data.train`",
    )
    _refuse(
        min(c.simulator.onset) < 0 or not 1e-6 <= max(c.simulator.onset) <= 1e6,
        f"`simulator.onset` is {shown(list(c.simulator.onset))}: give three weights up to 1e6, the largest above 1e-6",
    )
    _refuse(
        c.mesh.data != -1 and not 1 <= c.mesh.data <= 65536,
        f"`mesh.data` is {shown(c.mesh.data)}: use -1 (all devices) or between 1 and 65536",
    )
    config_rules_policy.check(c)
    _capability(c)
    _refuse(
        c.rollout.context > c.policy.max_length,
        f"`rollout.context` ({c.rollout.context}) exceeds `policy.max_length` ({c.policy.max_length})",
    )
    _refuse(
        c.rollout.max_turn_tokens >= c.rollout.context,
        f"`rollout.max_turn_tokens` ({c.rollout.max_turn_tokens}) leaves no room for a prompt in "
        f"`rollout.context` ({c.rollout.context})",
    )
    for name, nothing in (("top_p", 1.0), ("min_p", 0.0)):
        value = getattr(c.rollout, name)
        _refuse(
            c.rollout.top_k == 0 and value != nothing,
            f"`rollout.{name}` is {value} without a `rollout.top_k`: nothing bounds the ids that are left, which the "
            f"learner needs, so set `rollout.top_k` (64) or leave `rollout.{name}` at {nothing:g}",
        )
    for stage in ("sft", "grpo"):
        row = get(c, f"{stage}.microbatch.row_length")
        _refuse(
            row < c.rollout.context,
            f"`{stage}.microbatch.row_length` ({row}) is below `rollout.context` ({c.rollout.context}): "
            "long trajectories would be cut, raise it",
        )
    row = c.grpo.turn_credit.microbatch.row_length
    _refuse(
        c.grpo.turn_credit.enabled and row <= c.rollout.context,
        f"`grpo.turn_credit.microbatch.row_length` ({row}) must exceed `rollout.context` ({c.rollout.context}) by the "
        "tokens of an answer: raise it",
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
    for name, nothing in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        value = getattr(c.evaluation, name)
        _refuse(
            c.evaluation.temperature == 0 and value != nothing,
            f"`evaluation.{name}` is {value}, but `evaluation.temperature` 0 always takes the likeliest token: leave "
            f"it at {nothing:g} or raise the temperature",
        )
