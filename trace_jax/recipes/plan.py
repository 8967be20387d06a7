"""`trace-jax grpo --dry-run`: what a run would do and need, and whether its limits let answers end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trace_jax.config import ConfigError, RunConfig
from trace_jax.learner.roles import role_meshes
from trace_jax.recipes import plan_probe
from trace_jax.recipes.domain import domain_of
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.plan_memory import Sizes, estimate
from trace_jax.recipes.plan_probe import Investigations
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import BASE, RunDirectory
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.trajectory import Trajectory

MOST_TRUNCATED = 0.5  # share of answers cut off above which a run is refused
ENOUGH = 95  # percentile of what investigations need, which a limit should allow


def dry_run(config: RunConfig, run_dir: Path | None, source: Path | None) -> dict[str, Any]:
    """Prints the plan of a GRPO run (as YAML comments) and returns it. Writes nothing.

    Args:
        run_dir: the run, which may not exist yet. source: the run whose SFT policy it would start from.

    Returns:
        `parameters`; `tokens_per_step` (`expected`, `most`, `sampled`: of these expected from the policy);
        `sequences_per_step`; `optimizer_steps`; `memory`, see `plan_memory.estimate`, and `limit`, what a device has
        (None: unknown); `truncation` (`source`: "policy" or the teacher's name, `investigations`, `share`, `by_limit`,
        `needs`: the percentile `ENOUGH` of what each takes of a limit, `rough`: counted by a tokenizer that has seen
        nothing else, so somewhat high).

    Raises:
        ConfigError: most answers would be cut off; a field that the run used already was changed.
    """
    with Interrupt() as interrupt:
        seen, who = _probe(config, run_dir, source, interrupt)
    grpo = config.grpo
    vocab_size = config.policy.vocab_size or (seen.vocab_size if who == "policy" else config.tokenizer.vocab_size)
    sequences = grpo.prompts * grpo.group
    lengths = np.minimum(seen.needs["context"], config.rollout.context)
    memory = estimate(config, vocab_size, *role_meshes(config.mesh))
    known = jax.local_devices()[0].memory_stats() or {}
    result = {
        "parameters": Sizes.of(config, vocab_size).count,
        "tokens_per_step": {
            "expected": round(sequences * float(lengths.mean())),
            "most": sequences * config.rollout.context,
            "sampled": round(sequences * float(seen.sampled.mean())),
        },
        "sequences_per_step": sequences,
        "optimizer_steps": grpo.steps * grpo.iterations,
        "memory": {**memory, "limit": known.get("bytes_limit")},
        "truncation": {
            "source": who,
            "investigations": len(seen.ended),
            "share": seen.truncated,
            "by_limit": {f"rollout.{name}": float(cut.mean()) for name, cut in seen.cut.items()},
            "rough": seen.rough,
            "needs": {f"rollout.{name}": _enough(need) for name, need in seen.needs.items()},
        },
    }
    print("\n".join(f"# {line}" for line in _lines(config, result)), flush=True)
    if seen.truncated > MOST_TRUNCATED:
        with Interrupt() as interrupt:
            raise ConfigError(_refusal(config, seen, who, run_dir, source, interrupt))
    return result


def check_truncation(trajectories: Sequence[Trajectory], config: RunConfig, path: Path) -> None:
    """Refuses to train on a first collection that limits cut off for the most part: most of what the policy would
    learn from is no answer, and a run like this one ends where it began.

    Args:
        trajectories: of the first step. path: of the run.

    Raises:
        ConfigError: the limit and the mend.
    """
    seen = plan_probe.of_trajectories(trajectories, config.rollout)
    if seen.truncated <= MOST_TRUNCATED:
        return
    name = _main_limit(seen)
    begun = getattr(config.rollout, name)
    raise ConfigError(
        f"`rollout.{name}` ({begun}) cut off {seen.cut[name].mean():.0%} of the first answers: start again with more, "
        f"e.g. `trace-jax grpo --init {path} --rollout.{name} {2 * begun}`; with --dry-run it says what is enough"
    )


def _probe(
    config: RunConfig, run_dir: Path | None, source: Path | None, interrupt: Interrupt
) -> tuple[Investigations, str]:
    path, stage = _policy(config, run_dir, source)
    who = "policy" if stage else domain_of(config).teacher
    Progress().note(f"counting the tokens of {_whose(who)}; about half a minute")
    if stage:
        return plan_probe.of_policy(config, path, stage, interrupt), who
    return plan_probe.of_teacher(config, path, interrupt), who


def _policy(config: RunConfig, run_dir: Path | None, source: Path | None) -> tuple[Path | None, str | None]:
    """The run that is there already, and the stage whose policy GRPO would go on with (None: SFT is not finished)."""
    path = source or (run_dir if run_dir is not None and (run_dir / "config.yaml").is_file() else None)
    if path is None:
        return None, None
    run = RunDirectory(path, config, lock=False)
    if source is None:
        run.refuse_used(config)
    work = Workspace(run, Progress(), Interrupt())
    if not work.is_finished("sft"):
        return path, BASE if work.imported and work.store("sft").latest() is None else None
    return path, "sft" if source is not None else work.latest_stage()


def _whose(who: str) -> str:
    return "the policy's answers" if who == "policy" else f"the scripted {who}'s transcripts"


def _enough(need: np.ndarray) -> int:
    return math.ceil(np.percentile(need, ENOUGH))


def _main_limit(seen: Investigations) -> str:
    return max(seen.cut, key=lambda name: seen.cut[name].mean())


def _refusal(
    config: RunConfig, seen: Investigations, who: str, run_dir: Path | None, source: Path | None, interrupt: Interrupt
) -> str:
    name = _main_limit(seen)
    said = (
        f"`rollout.{name}` ({getattr(config.rollout, name)}) would cut off {seen.cut[name].mean():.0%} of {_whose(who)}"
    )
    path = source or run_dir
    if who == "policy":  # where would they have ended?
        wider = plan_probe.widened(config)
        seen = plan_probe.of_policy(wider, path, _policy(config, run_dir, source)[1], interrupt)
        if seen.ended.mean() < MOST_TRUNCATED:
            tried = ", ".join(f"{limit} {getattr(wider.rollout, limit)}" for limit in plan_probe.LIMITS)
            return f"{said}, and limits of {tried} most of them, too: train SFT longer, or lower rollout.temperature"
    wanted = {limit: _enough(need[seen.ended]) for limit, need in seen.needs.items()}
    flags = [f"--{field} {value}" for field, value in _raised(config, wanted, who).items()]
    new = f" in a new run (--init {path})" if who == "policy" and source is None else ""
    return f"{said}: raise it{new}, e.g. {' '.join(flags)}"


def _raised(config: RunConfig, wanted: dict[str, int], who: str) -> dict[str, int]:
    """Fields to raise so that investigations of these needs fit, with the fields that must follow."""
    limits = config.rollout
    values = {f"rollout.{name}": value for name, value in wanted.items() if value > getattr(limits, name)}
    context = max(values.get("rollout.context", limits.context), values.get("rollout.max_turn_tokens", 0) + 1)
    if context <= limits.context:
        return values
    values["rollout.context"] = context
    if context > config.policy.max_length:
        values["policy.max_length"] = context
    for stage in ("sft", "grpo") if who != "policy" else ("grpo",):
        if getattr(config, stage).microbatch.row_length < context:
            values[f"{stage}.microbatch.row_length"] = context
    return values


def _lines(config: RunConfig, plan: dict[str, Any]) -> list[str]:
    """The plan in words."""
    tokens, memory, cut = plan["tokens_per_step"], plan["memory"], plan["truncation"]
    grpo, limit = config.grpo, memory["limit"]
    held = {k: v for k, v in memory.items() if v and k not in ("learner", "sampler", "total", "limit")}
    apart = memory["total"] < memory["learner"] + memory["sampler"]
    whole = f"{_bytes(memory['total'])} of {_bytes(limit)}" if limit else _bytes(memory["total"])
    lines = [
        f"plan of {config.name}",
        f"parameters      {plan['parameters']:,}",
        f"optimizer steps {plan['optimizer_steps']:,} = {grpo.steps} steps x {grpo.iterations}",
        f"a step          {grpo.prompts} prompts x {grpo.group} = {plan['sequences_per_step']:,} sequences, about "
        f"{tokens['expected']:,} tokens ({tokens['sampled']:,} sampled), at most {tokens['most']:,}",
        f"memory          {whole} of a device" + (" that samples or learns" if apart else ""),
        *(f"  {name.replace('_', ' '):18s}{_bytes(size):>10s}" for name, size in held.items()),
        f"truncated       {cut['share']:.0%} of {cut['investigations']} ({_whose(cut['source'])}); {ENOUGH}% take",
        *(
            f"  {name:25s}{need:>6,} of {getattr(config.rollout, name.removeprefix('rollout.')):,}"
            + (f", which cuts off {cut['by_limit'][name]:.0%}" if cut["by_limit"][name] else "")
            for name, need in cut["needs"].items()
        ),
    ]
    if cut["rough"]:
        lines.append("  (by a tokenizer trained on these alone; the run's own will need fewer)")
    if limit and memory["total"] > limit:
        lines.append("does not fit: lower rollout.slots or grpo.microbatch.rows, set policy.remat, or widen the mesh")
    return lines


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
