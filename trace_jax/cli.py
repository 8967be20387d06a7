"""The `trace-jax` command line: parses, hands over to a recipe, and turns errors into one line and an exit status.

Exit status: 0 success, 2 bad input (one line on stderr), 1 failure, 130 interrupted with everything saved.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.recipes.interrupt import Interrupted

# The machine's limits, not faults of the program: reported as one line like any other bad input.
_MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}


class _Parser(argparse.ArgumentParser):
    """argparse that reports bad usage through `ConfigError` (argparse itself prints a usage block)."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def _simulate(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import dataset

    return dataset.simulate(config, args.out, args.split or None)


def _inspect(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import dataset

    return dataset.inspect(config, args.split, args.index)


def _train(args: argparse.Namespace, config: RunConfig | None) -> dict[str, Any]:
    from trace_jax.recipes import train

    return train.command(args.command, args.run_dir, config, resume=args.resume, source=getattr(args, "init", None))


def _eval(args: argparse.Namespace, config: RunConfig | None) -> dict[str, Any]:
    from trace_jax.recipes import assess

    return assess.command(args.run_dir, config, agent=args.agent, split=args.split)


def _export(args: argparse.Namespace, config: RunConfig | None) -> dict[str, Any]:
    from trace_jax.recipes import export

    return export.command(args.run_dir, config, stage=args.stage, out=args.out)


def _bench(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax import bench

    result = bench.run(args.kind, config, repeats=args.repeats)
    print(bench.text(result))
    return result


def _report(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.report import html

    page = html.write(args.run_dir, args.out)
    print(page)
    return {"report": str(page)}


SPLITS = ("train", "validation", "test")
COMMANDS: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "simulate": ("make verified episodes: Parquet data sets and a manifest", _simulate),
    "inspect": ("show one episode: its tables, the hidden cause, what the oracle saw", _inspect),
    "train": ("the whole recipe: tokenizer, teacher, SFT, GRPO, held-out evaluation, export, report", _train),
    "sft": ("the recipe up to the end of supervised fine-tuning", _train),
    "grpo": ("GRPO, in a run whose SFT is done or in a new one from its policy (--init)", _train),
    "eval": ("score a run's policy or a baseline on held-out episodes", _eval),
    "export": ("write a run's policy in Hugging Face layout (safetensors)", _export),
    "bench": ("throughput as a share of what this machine can do: sim, tools, rollout, learner", _bench),
    "report": ("one self-contained HTML page of a run, finished or not", _report),
}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="trace-jax",
        description="Train agents that find out why a metric moved.",
        epilog="Any field of the configuration can be set with --section.field value, e.g. --grpo.steps 20.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trace-jax {metadata.version('trace-jax')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, (text, _) in COMMANDS.items():
        p = commands.add_parser(name, help=text, description=text, allow_abbrev=False, epilog=parser.epilog)
        p.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration (default: built-in values)")
        p.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        if name in ("train", "sft", "grpo", "simulate"):
            p.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
        if name in ("train", "sft", "grpo", "eval", "export", "report"):
            p.add_argument("--run-dir", type=Path, metavar="DIR", help="default for new runs: runs/<config>-<date>")
        if name in ("train", "sft", "grpo"):
            p.add_argument("--resume", action="store_true", help="continue the run in --run-dir where it stopped")
        if name == "grpo":
            p.add_argument("--init", type=Path, metavar="DIR", help="start a new run from the SFT policy of this run")
        if name == "simulate":
            p.add_argument("--out", type=Path, default=Path("data"), metavar="DIR", help="default: data")
            p.add_argument("--split", action="append", choices=SPLITS, help="only this split (may be repeated)")
        if name == "inspect":
            p.add_argument("--split", default="test", choices=SPLITS)
            p.add_argument("--index", type=int, default=0, help="position in the split, from 0")
        if name == "eval":
            p.add_argument("--split", default="test", choices=SPLITS)
            p.add_argument("--agent", default="latest", choices=("latest", "grpo", "sft", "untrained", "analyst"))
        if name == "bench":
            p.add_argument("kind", choices=("sim", "tools", "rollout", "learner"), metavar="KIND")
            p.add_argument(
                "--repeats", type=int, default=5, help="timed repetitions; medians are reported (default: 5)"
            )
        if name == "report":
            p.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the run directory")
        if name == "export":
            p.add_argument("--stage", default="latest", choices=("latest", "grpo", "sft"))
            p.add_argument("--out", type=Path, metavar="DIR", help="default: <run directory>/export")
    return parser


def split_overrides(argv: Sequence[str], flags: set[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separates `--section.field value` (also `--section.field=value`) from the command's own flags.

    Raises:
        ConfigError: an option that is neither, or a field without a value.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        field = name[2:].replace("-", "_")
        if not word.startswith("--") or word == "--" or name in flags:
            rest.append(word)
            continue
        if field not in config_io.names():
            meant = config_io.nearest(name[2:], [f[2:] for f in flags] + config_io.names())
            raise ConfigError(f"unknown option {name}" + (f": did you mean --{meant}?" if meant else ""))
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise ConfigError(f"{name} needs a value: {name} VALUE")
        overrides.append((field, value))
    return rest, overrides


def _flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> set[str]:
    chosen = next((w for w in argv if not w.startswith("-")), None)
    sub = parser._subparsers._group_actions[0].choices.get(chosen)  # type: ignore[union-attr]
    known = [parser] if sub is None else [parser, sub]
    return {option for p in known for option in p._option_string_actions}


def _run(argv: Sequence[str]) -> int:
    parser = _parser()
    command = next((w for w in argv if not w.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        meant = config_io.nearest(command, COMMANDS)
        mend = f"did you mean {meant}?" if meant else f"commands: {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {command}: {mend}")
    words, overrides = split_overrides(argv, _flags(parser, argv))
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 2
    config = config_io.load(_config_file(args), overrides)
    if getattr(args, "dry_run", False):
        if args.command != "simulate":
            from trace_jax.recipes import train

            train.check(config)
        print(config_io.dump(config), end="")
        if args.json:
            print(json.dumps(dict(config_io.flatten(config))), flush=True)
        return 0
    result = COMMANDS[args.command][1](args, config)
    if args.json:
        print(json.dumps(result), flush=True)
    return 0


def _config_file(args: argparse.Namespace) -> Path | None:
    """The file that a command's configuration starts from: --config, or the one of the run it works on."""
    if args.config is not None or args.command in ("simulate", "inspect"):
        return args.config
    init = getattr(args, "init", None)
    if args.command == "bench":
        return None
    continues = args.command in ("grpo", "eval", "export", "report") or args.resume
    run = init or (args.run_dir if continues else None)
    if run is None:
        if continues and getattr(args, "agent", None) != "analyst":
            raise ConfigError("which run? give its directory with --run-dir")
        return None
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"no run in {run} (no config.yaml there): give the directory of a run")
    return run / "config.yaml"


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {_one_line(message)}\n"
    try:
        return _run(argv)
    except ConfigError as error:
        print(f"trace-jax: {_one_line(error)}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"interrupted; continue with: {stop.resume or shlex.join(['trace-jax', *argv])}", file=sys.stderr)
        return stop.status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in _MACHINE_ERRORS:
            traceback.print_exc()
            return 1
        where = f" {error.filename}" if error.filename else ""
        reason = os.strerror(error.errno).lower()
        print(f"trace-jax: cannot write{where}: {reason}; mend that and continue with --resume", file=sys.stderr)
        return 2
    except Exception as error:
        traceback.print_exc()
        print(f"trace-jax: failed: {_one_line(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
