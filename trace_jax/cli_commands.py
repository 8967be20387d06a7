"""What each command of `trace-jax` hands its arguments to. Recipes are imported when they are asked for."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.recipes import distributed


def _simulate(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import exports, simulate

    if args.export is not None:
        if args.split or args.resume or args.composition != "paper":
            raise ConfigError("--export takes no --split, --composition or --resume: leave them out")
        return exports.command(config, args.export, args.out, args.episodes)
    return simulate.simulate(
        config,
        args.out,
        names=args.split or (),
        episodes=args.episodes,
        composition=args.composition,
        resume=args.resume,
    )


def _inspect(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import inspect, inspect_trajectory

    if args.trajectory is not None:
        for flag in ("cause", "dimensions", "proposal", "out", "config"):
            if getattr(args, flag) is not None:
                raise ConfigError(f"--{flag} does not go with --trajectory: leave one out")
        if args.tables or config != RunConfig():
            raise ConfigError("--trajectory takes no --tables and no fields: it uses the configuration of its run")
        return inspect_trajectory.show(args.trajectory, args.index, args.split)
    return inspect.inspect(
        config,
        args.split,
        args.index,
        cause=args.cause,
        dimensions=args.dimensions,
        proposal=args.proposal,
        out=args.out,
        tables=args.tables,
    )


def _play(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import play

    return play.play(config, args.split, args.index, seed=args.seed, out=args.out, run_dir=args.run_dir)


def _diagnose(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import diagnose

    asked = {name.name: getattr(args, name.name) for name in dataclasses.fields(diagnose.Asked)}
    return diagnose.command(config, diagnose.Asked(**asked | {"files": tuple(args.files)}))


def _train(args: argparse.Namespace, config: RunConfig | None) -> dict[str, Any]:
    from trace_jax.recipes import train

    source = getattr(args, "init", None)
    asked = {"resume": args.resume, "source": source, "profile": args.profile, "track": args.track}
    return train.command(args.command, args.run_dir, config, **asked)


def _eval(args: argparse.Namespace, config: RunConfig | None) -> dict[str, Any]:
    from trace_jax.recipes import assess, compare, leaderboard

    if args.table:
        for flag, name in (("run_dir", "--run-dir"), ("compare", "--compare")):
            if getattr(args, flag) is not None:
                raise ConfigError(f"{name} does not go with --table, which names its runs: leave it out")
        return leaderboard.command(args.table, args.out, config.evaluation, config.seed)
    if args.out is not None:
        raise ConfigError("--out is of `eval --table`: results go into --run-dir, leave it out")
    if args.compare:
        if distributed.several():
            raise ConfigError("--compare reads results, which one process does: start it once")
        return compare.command(tuple(args.compare), args.run_dir, config.evaluation, config.seed)
    return assess.command(args.run_dir, config, agent=args.agent, split=args.split)


def _capability(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import adapters, capability_run, contrast, routing, worlds

    if args.action == "run":
        return capability_run.command(args.run_dir, args.overrides, seeds=args.seeds, rollouts=args.rollouts)
    if args.action == "route":
        return routing.route(args.run_dir, config, split=args.split, out=args.out)
    if args.action == "eval":
        return routing.evaluate(args.run_dir, config, split=args.split, names=args.agents, out=args.out)
    if args.action == "train":
        return adapters.command(args.run_dir, config, args.overrides, names=args.capabilities, out=args.out)
    if args.action == "worlds":
        return worlds.command(
            args.run_dir, config, names=args.capabilities, seeds=args.seeds, rollouts=args.rollouts, out=args.out
        )
    asked = {name: getattr(args, name) for name in ("stage", "split", "episodes", "samples", "trajectories", "out")}
    return contrast.command(args.run_dir, config, **asked)


def _import(args: argparse.Namespace, config: None) -> dict[str, Any]:
    from trace_jax.recipes import import_model

    return import_model.command(args.source, args.run_dir, args.config, args.overrides)


def _export(args: argparse.Namespace, config: RunConfig | None) -> dict[str, Any]:
    from trace_jax.recipes import export

    asked = {"stage": args.stage, "out": args.out, "form": args.format, "dtype": args.dtype}
    return export.command(args.run_dir, **asked, shard_bytes=args.shard_size)


def _certify(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import certify

    return certify.certify(config, args.out, args.episodes)


def _fit_rules(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import fit_rules

    return fit_rules.fit_rules(config, args.out, episodes=args.episodes, run_dir=args.run_dir)


def _bench(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax import bench

    if args.run_dir is not None and args.kind != "probe":
        raise ConfigError(f"bench {args.kind} looks at no run: leave --run-dir out")
    if args.run_dir is not None:
        from trace_jax.recipes import probe_share

        probe_share.check(args.run_dir)
    result = bench.run(args.kind, config, repeats=args.repeats, peers=args.peers)
    if args.run_dir is not None:
        result |= probe_share.measure(args.run_dir, args.repeats)
        del result["note"]
    print(bench.text(result))
    return result


def _compile(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes.ahead import command

    return command.command(config, args.topology, rollout=args.rollout, out=args.out)


def _reproduce(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import planted, reproduce, scored, targeting
    from trace_jax.recipes.studies import SCORED

    if args.study == targeting.NAME:
        if args.variants:
            raise ConfigError(f"--variants does not go with {targeting.NAME}, whose rows need each other: leave it out")
        return targeting.command(
            config,
            args.overrides,
            args.out,
            source=args.init,
            seeds=args.seeds or targeting.SEEDS,
            steps=args.steps,
            size=(args.world_seeds, args.world_rollouts),
            gate_steps=args.gate_steps,
        )
    for flag in ("world_seeds", "world_rollouts", "gate_steps"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')} is of {targeting.NAME}: leave it out")
    if args.study == planted.NAME:
        for flag in ("init", "steps"):
            if getattr(args, flag) is not None:
                raise ConfigError(f"--{flag} does not go with {planted.NAME}, which trains SFT policies: leave it out")
        return planted.command(config, args.out, seeds=args.seeds or planted.SEEDS, variants=args.variants)
    return (scored if args.study in SCORED else reproduce).command(
        args.study,
        config,
        args.out,
        source=args.init,
        seeds=args.seeds or reproduce.SEEDS,
        variants=args.variants,
        steps=args.steps,
    )


def _report(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.report import html

    page = html.write(args.run_dir, args.out, compare=args.compare, limit=args.trajectories)
    print(page)
    return {"report": str(page)}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "simulate": _simulate,
    "inspect": _inspect,
    "play": _play,
    "certify": _certify,
    "train": _train,
    "sft": _train,
    "grpo": _train,
    "eval": _eval,
    "diagnose": _diagnose,
    "capability": _capability,
    "import": _import,
    "export": _export,
    "fit-rules": _fit_rules,
    "bench": _bench,
    "compile": _compile,
    "reproduce": _reproduce,
    "report": _report,
}


def dry_run(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    """Prints what a command would do; nothing is written."""
    fields = dict(config_io.flatten(config))
    if args.command == "simulate":
        from trace_jax.recipes import simulate

        simulate.check(args.split or (), args.episodes)
    else:
        from trace_jax.recipes import train

        train.check(config)
        if getattr(args, "init", None) is not None:
            train.check_new(args.command, args.run_dir, config, args.init)
    if distributed.leads():
        print(config_io.dump(config), end="", flush=True)
    if args.command != "grpo" or distributed.several():
        return fields
    from trace_jax.recipes import plan

    return {"config": fields, **plan.dry_run(config, args.run_dir, args.init)}
