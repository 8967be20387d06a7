"""Held-out evaluation of a run's policy and of the baselines, and the table that compares them."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_rules import get
from trace_jax.evaluation import identity, sets, store, table
from trace_jax.evaluation.baselines import evaluate_agent
from trace_jax.evaluation.evaluate import evaluate_policy, records_of
from trace_jax.learner import multihost
from trace_jax.recipes import distributed, processes, programs, prompted, shipped
from trace_jax.recipes.domain import SCRIPTED, check_agent, domain_of
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.rundir import RunDirectory, stored_config, writing
from trace_jax.recipes.workspace import Workspace, on_this_machine
from trace_jax.rollout.collect_stats import CollectStats
from trace_jax.rollout.trajectory import Trajectory, write_parquet

AGENTS = ("untrained", *SCRIPTED, "sft", "grpo")
OTHER = "other/"  # results of other splits or settings, under evaluation/ and trajectories/
SAMPLER = ("temperature", "top_k", "top_p", "min_p")  # `rollout` has one for training, `evaluation` its own
LIMITS = (
    "rollout.context",
    "rollout.max_turns",
    "rollout.max_turn_tokens",
    "rollout.trajectory_seconds",
)


def command(run_dir: Path | None, config: RunConfig, *, agent: str, split: str) -> dict[str, Any]:
    """Scores an agent and prints the table of all that were scored; returns its results.

    Args:
        run_dir: the run; without one only agents without a policy can be scored, and nothing is kept.
        config: the run's configuration with changes to evaluation, rollout or data.
        agent: one of `AGENTS`; "endpoint": the model that `endpoint` names; "shipped": the package's own policy, which
            needs no run; "best": GRPO's checkpoint with the best validation reward; "latest": the most advanced stage.

    Raises:
        ConfigError: a change that has no meaning here or would cut the policy's investigations short.
    """
    if agent == prompted.AGENT:
        run_dir, config = prompted.prepare(run_dir, config)
    elif config.endpoint.url or config.endpoint.model:
        raise ConfigError("--endpoint and --model are of `eval --agent endpoint`: add that, or leave them out")
    check_agent(config, agent)
    if distributed.several() and (run_dir is None or agent not in ("untrained", "sft", "grpo", "best", "latest")):
        raise ConfigError(f"several processes score a policy of a run together, not {agent}: start the command once")
    if agent == shipped.AGENT:
        if run_dir is not None:
            raise ConfigError("--agent shipped is scored on the episodes that it was made for: leave --run-dir out")
        own = shipped.stored()
        _check_changes(own, config, config_io.differences(own, config), split)
        programs.keep()
    with tempfile.TemporaryDirectory() as scratch:
        if run_dir is None:
            run, changed = RunDirectory.create(Path(scratch) / "run", on_this_machine(config)), []
        else:
            stored = stored_config(run_dir)
            changed = config_io.differences(stored, config)
            if agent == prompted.AGENT:
                changed = [name for name in changed if not name.startswith("endpoint.")]
            _check_changes(stored, config, changed, split)
            if "evaluation.rules" in changed and agent not in domain_of(config).rivals:
                raise ConfigError(f"`evaluation.rules` has no part in what {agent} does: leave it out")
            run = processes.open_run(run_dir, config, RunDirectory.open, new=False)
            run.config = prompted.worded(config) if agent == prompted.AGENT else on_this_machine(config)
        with run, Interrupt() as interrupt:
            work = Workspace(run, processes.progress(run), interrupt)
            if agent == shipped.AGENT:
                work.furnish()
            agent = work.latest_stage() if agent == "latest" else agent
            known = prompted.name_of(config) if agent == prompted.AGENT else agent
            name = name_of(known, split, {field: get(config, field) for field in changed})
            result = score(work, agent, split, name)
            if distributed.leads():
                show(run.path, {name.rpartition("/")[2]: result}, config.evaluation.set)
                print(identity.line(result["benchmark"]))
    return result


def _check_changes(stored: RunConfig, config: RunConfig, changed: Sequence[str], split: str) -> None:
    """Refuses changes that an evaluation does not use, or that make it one of a crippled policy."""
    chosen = config.evaluation.set
    if chosen and split != "test":
        raise ConfigError(f"the {chosen} set takes the place of the test split: leave --split {split} or --set out")
    for name in changed:
        if chosen and name in ("data.seed", "data.test"):
            raise ConfigError(f"`{name}` has no part in the {chosen} set, which is fixed: leave it or --set out")
        section = name.split(".")[0]
        if section == "evaluation" or name in ("data.seed", f"data.{split}"):
            continue
        sampler = name.removeprefix("rollout.") in SAMPLER
        if section != "rollout" or sampler:
            also = f" (evaluation.{name.removeprefix('rollout.')} does)" if sampler else ""
            raise ConfigError(
                f"`{name}` cannot change in `eval`{also}: only evaluation.*, data.seed, data.{split} and rollout.* can"
            )
        old, new = get(stored, name), get(config, name)
        if name in LIMITS and new < old:
            raise ConfigError(f"`{name}` {new} would cut short what the policy learned at {old}: use at least {old}")


def name_of(agent: str, split: str, changes: Mapping[str, Any]) -> str:
    """Name of the result under `evaluation/`. Those of another split or other settings than the run's own lie in a
    directory of their own, which the report leaves out."""
    own = split == "test" and not changes.keys() - {"evaluation.set"}
    if own and (agent in AGENTS or agent.startswith(f"{prompted.AGENT}-")):
        return "/".join(filter(None, (str(changes.get("evaluation.set", "")), agent)))
    return OTHER + _short(agent, *([split] if split != "test" else []), *_said(changes))


def label_of(split: str, changes: Mapping[str, Any]) -> str:
    """Name of a directory of results of a split with other settings than the run's own."""
    return _short(split, *_said(changes))


def _said(changes: Mapping[str, Any]) -> list[str]:
    return [f"{k}={v}" for k, v in sorted(changes.items())]


def _short(*parts: str) -> str:
    name = ",".join(parts).replace("/", "_")  # a path may be among the changes
    return name if len(name) <= 120 else f"{name[:110]}~{zlib.crc32(name.encode()):08x}"


def _settings(config: RunConfig, split: str) -> dict[str, Any]:
    """What a result depends on besides the policy, as far as it may change within a run."""
    kept = ("seed", "evaluation.", "rollout.", "environment.reward_", "data.seed", f"data.{split}")
    speed = ("tool_workers", "slots", "decode_steps", "stale_cache")  # no parameters change while a policy is scored
    unused = {f"rollout.{name}" for name in SAMPLER + speed}
    fields = {k: v for k, v in config_io.flatten(config) if k.startswith(kept) and k not in unused}
    for later in ("set", "rules"):  # results from before there were any stay valid
        if not getattr(config.evaluation, later):
            del fields[f"evaluation.{later}"]
    return {"split": split} | fields


def evaluate(work: Workspace, agent: str) -> dict[str, Any]:
    """Results of an agent on the test split with the run's settings; scored unless the run directory holds them."""
    known = multihost.first("known", lambda: stored(work.run.path, work.config, agent))
    return score(work, agent) if known is None else known


def stored(run_dir: Path, config: RunConfig, agent: str) -> dict[str, Any] | None:
    """Results of an agent on the test split that a run directory holds, if they are of a run with these settings."""
    known = store.load_summaries(run_dir).get(agent)
    wanted = _settings(config, "test")
    return known if known is not None and known.get("settings", wanted) == wanted else None


def score(work: Workspace, agent: str, split: str = "test", name: str | None = None) -> dict[str, Any]:
    """Results of an agent, scored now (`summarise` of its kind, and the settings).

    Args:
        name: under which they are kept in the run directory; None: the agent's.
    """
    name = agent if name is None else name
    config, domain = work.config, domain_of(work.config)
    config = sets.applied(config) if split == "test" else config
    environment = work.environment(split)
    indices = range(len(environment))
    with work.progress.bar(f"evaluate {name}", len(environment)) as bar:

        def report(done: int, of: int) -> None:
            bar.update(done * len(environment) // max(of, 1))  # this process's share of them, if there are several
            work.interrupt.check()

        def policy(_: CollectStats, share: tuple[int, int]) -> list[Trajectory]:
            trajectories = evaluate_policy(
                work.engine,
                work.chat,
                environment,
                indices,
                config.evaluation,
                config.rollout,
                seed=config.seed,
                on_progress=report,
                share=share,
            )
            # A terminal's Ctrl-C also reaches the tool's processes: what came back last may be spoilt.
            work.interrupt.check()
            return trajectories

        work.interrupt.check()
        trajectories: list[Trajectory] = []
        if agent not in (*domain.scripted, *domain.bounds, prompted.AGENT):
            untrained = agent in ("untrained", shipped.AGENT)  # here: it came as it is
            params = work.initial_params if untrained else work.trained_params(agent)
            work.engine.set_params(params, 0)
            trajectories = processes.shared(work.run, work.interrupt, "evaluate", policy, work.engine)
            work.engine.free()  # what comes next may need the memory

        def keep() -> dict[str, Any]:
            usage = None
            if agent in domain.scripted:
                scripted, record_of = partial(domain.scripted[agent], config=config), domain.kind.record_of
                records = evaluate_agent(
                    environment, indices, scripted, record_of, seed=config.seed, on_progress=report
                )
            elif agent in domain.bounds:
                records = domain.bounds[agent](environment, config, report)
            elif agent == prompted.AGENT:
                records, usage = prompted.evaluate(work, environment, name, report)
            else:
                records = records_of(trajectories, domain.kind.record_of)
                path = work.run.folder("trajectories") / f"{name}.parquet"
                with writing(path):
                    path.parent.mkdir(exist_ok=True)
                    write_parquet(path, trajectories)
            result = domain.kind.summarise(records, config.evaluation, seed=config.seed)
            result["settings"] = _settings(config, split)
            result["benchmark"] = identity.benchmark_of(environment)
            if usage is not None:
                result["extra"]["usage"] = usage
                result["settings"] |= {k: v for k, v in config_io.flatten(config) if k.startswith("endpoint.")}
            store.save(work.run.path, name, result, records)
            return result

        return processes.lead(work.interrupt, "assess", keep)


def show(run_dir: Path, results: dict[str, Any] | None = None, under: str = "") -> None:
    """Prints the table of everything scored in a run on one set (plain text when stdout is not a terminal)."""
    table.show(table.build(store.load_summaries(run_dir, under) | (results or {})))
