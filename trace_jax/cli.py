"""The `trace-jax` command line: parses, hands over to a recipe, and turns errors into one line and an exit status.

Exit status: 0 success, 2 bad input (one line on stderr), 1 failure, 130 interrupted with everything saved.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.recipes.interrupt import Interrupt, Interrupted
from trace_jax.recipes.rundir import stored_config

# The machine's limits, not faults of the program: reported as one line like any other bad input.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EROFS, errno.EACCES, errno.EPERM}
_BAD_PATH = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
_MACHINE_ERRORS = _NO_SPACE | _NO_PERMISSION | _BAD_PATH
_TRAINING = ("train", "sft", "grpo")
_MEMORY = (
    "out of memory: lower rollout.slots, sft.microbatch.rows, grpo.microbatch.rows, simulator.batch, the sizes of the "
    "policy or those of the data"
)
_STOPPABLE = (*_TRAINING, "eval", "export", "simulate", "inspect", "play", "certify")
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_FIXED = ("export", "report")  # show a run as it was: no configuration of their own


class _Parser(argparse.ArgumentParser):
    """argparse that reports bad usage through `ConfigError` (argparse itself prints a usage block)."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def _simulate(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import simulate

    return simulate.simulate(
        config,
        args.out,
        names=args.split or (),
        episodes=args.episodes,
        composition=args.composition,
        resume=args.resume,
    )


def _inspect(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import inspect

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


def _train(args: argparse.Namespace, config: RunConfig | None) -> dict[str, Any]:
    from trace_jax.recipes import train

    return train.command(args.command, args.run_dir, config, resume=args.resume, source=getattr(args, "init", None))


def _eval(args: argparse.Namespace, config: RunConfig | None) -> dict[str, Any]:
    from trace_jax.recipes import assess

    return assess.command(args.run_dir, config, agent=args.agent, split=args.split)


def _export(args: argparse.Namespace, config: RunConfig | None) -> dict[str, Any]:
    from trace_jax.recipes import export

    return export.command(args.run_dir, stage=args.stage, out=args.out)


def _certify(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.recipes import certify

    return certify.certify(config, args.out, args.episodes)


def _bench(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax import bench

    result = bench.run(args.kind, config, repeats=args.repeats, peers=args.peers)
    print(bench.text(result))
    return result


def _report(args: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    from trace_jax.report import html

    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    page = html.write(args.run_dir, args.out)
    print(page)
    return {"report": str(page)}


_BENCHES = {
    "sim": "episodes a second of the simulator and of its oracle",
    "tools": "loading of episodes and calls of the agent's tool, against bare DuckDB",
    "rollout": "the sampling engine beside other samplers; takes about 5 minutes, whatever the configuration",
    "learner": "tokens a second of a training step",
}
_LATEST = "latest is GRPO's policy if the run has one, else SFT's (default: latest)"
_STYLE = "wording of the question: full sentences, or the short one a nano policy reads (default: full)"
_SPLIT = "which episodes: train, validation or the held-out test (default: test)"
SPLITS = ("train", "validation", "test")
COMMANDS: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "simulate": ("make verified episodes: Parquet data sets and a manifest", _simulate),
    "inspect": ("show one episode or proposal: curves, the hidden cause, the oracle's margins", _inspect),
    "play": ("investigate an episode yourself, with the agent's tool, and be graded", _play),
    "certify": ("measure what labels are worth: acceptance, likelihood ceiling, difficulty; write a note", _certify),
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
        p.set_defaults(config=None)
        if name in _FIXED:
            p.epilog = None
        else:
            p.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration (default: built-in values)")
        p.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        if name in (*_TRAINING, "simulate"):
            p.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
        if name in (*_TRAINING, "eval", "export", "report"):
            new = name in ("train", "sft", "grpo")
            help_text = "default for new runs: runs/<config>-<date>" if new else "directory of the run"
            p.add_argument("--run-dir", type=Path, metavar="DIR", help=help_text)
        if name in _TRAINING:
            p.add_argument("--resume", action="store_true", help="continue the run in --run-dir where it stopped")
        if name == "grpo":
            p.add_argument("--init", type=Path, metavar="DIR", help="start a new run from the SFT policy of this run")
        if name == "simulate":
            p.add_argument("--out", type=Path, default=Path("data"), metavar="DIR", help="default: data")
            p.add_argument("--episodes", type=int, metavar="N", help="one split of N episodes instead of data.*")
            p.add_argument("--seed", dest="data_seed", metavar="S", help="same as --data.seed")
            p.add_argument(
                "--difficulty",
                dest="simulator_difficulty",
                metavar="LEVEL",
                help="easy, paper or hard; same as --simulator.difficulty",
            )
            p.add_argument("--composition", default="paper", choices=("paper", "balanced"), help="mix of causes")
            p.add_argument("--split", action="append", choices=SPLITS, help="only this split (may be repeated)")
            p.add_argument("--resume", action="store_true", help="continue the data set in --out where it stopped")
        if name == "certify":
            p.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="default: docs")
            p.add_argument("--episodes", type=int, default=1200, metavar="N", help="proposals at each setting")
        if name == "inspect":
            p.add_argument("--split", default="test", choices=SPLITS, help=_SPLIT)
            p.add_argument("--index", type=int, metavar="I", help="position in the split, from 0 (default: 0)")
            p.add_argument("--cause", metavar="NAME", help="a proposal of this cause instead, accepted or not")
            p.add_argument("--dimensions", type=int, metavar="D", help="attributes in the proposal's slice: 0, 1 or 2")
            p.add_argument("--proposal", type=int, metavar="I", help="number of the proposal, from 0 (default: 0)")
            p.add_argument("--out", type=Path, metavar="FILE", help="also write one self-contained HTML page")
            p.add_argument("--tables", action="store_true", help="also print the first rows of every table")
        if name == "play":
            p.add_argument("--split", default="test", choices=SPLITS, help=_SPLIT)
            p.add_argument("--index", type=int, metavar="I", help="position in the split, from 0 (default: drawn)")
            p.add_argument("--seed", type=int, metavar="S", help="draws the episode (default: another one every time)")
            p.add_argument("--style", dest="environment_prompt", choices=("full", "compact"), help=_STYLE)
            p.add_argument("--out", type=Path, metavar="FILE", help="also keep the transcript, as JSON")
            p.add_argument("--run-dir", type=Path, metavar="DIR", help="a run whose policy's answers are shown, too")
        if name == "eval":
            p.add_argument("--split", default="test", choices=SPLITS, help=_SPLIT)
            agents = ("latest", "grpo", "sft", "untrained", "analyst")
            whose = f"whom to score: a stage of the run, the untrained policy or the scripted analyst; {_LATEST}"
            p.add_argument("--agent", default="latest", choices=agents, help=whose)
        if name == "bench":
            p.formatter_class = argparse.RawDescriptionHelpFormatter
            p.description = f"{text}\n\nKIND is one of\n" + "".join(f"  {k:9s}{t}\n" for k, t in _BENCHES.items())
            p.add_argument("kind", choices=tuple(_BENCHES), metavar="KIND", help=", ".join(_BENCHES))
            p.add_argument(
                "--repeats", type=int, default=5, metavar="N", help="timed rounds; medians are reported (default: 5)"
            )
            p.add_argument(
                "--peers",
                metavar="PYTHON",
                help="only for rollout: an interpreter with torch and transformers to compare with (default: this one)",
            )
        if name == "report":
            p.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the run directory")
        if name == "export":
            stage = f"whose policy to write; {_LATEST}"
            p.add_argument("--stage", default="latest", choices=("latest", "grpo", "sft"), help=stage)
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
    sub = parser._subparsers._group_actions[0].choices.get(_command(argv))  # type: ignore[union-attr]
    known = [parser] if sub is None else [parser, sub]
    return {option for p in known for option in p._option_string_actions}


def _run(argv: Sequence[str]) -> int:
    parser = _parser()
    command = _command(argv)
    if command is not None and command not in COMMANDS:
        meant = config_io.nearest(command, COMMANDS)
        mend = f"did you mean {meant}?" if meant else f"commands: {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {command}: {mend}")
    if command in _FIXED and any(w.partition("=")[0] == "--config" for w in argv):
        raise ConfigError(f"`{command}` takes no --config: it uses that of the run")
    words, overrides = split_overrides(argv, _flags(parser, argv))
    args = parser.parse_args(words)
    if command in _FIXED and overrides:
        raise ConfigError(f"`{command}` takes no --{overrides[0][0]}: it uses the configuration of the run")
    if args.command is None:
        parser.print_help()
        return 2
    overrides += _short(args, overrides)
    config = _config(args, overrides)
    if getattr(args, "dry_run", False):
        if args.command == "simulate":
            from trace_jax.recipes import simulate

            simulate.check(args.split or (), args.episodes)
        else:
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


def _short(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The fields that commands have short flags for. ConfigError if the field itself is given another value."""
    found = []
    fields = {"seed": "data.seed", "difficulty": "simulator.difficulty", "style": "environment.prompt"}
    for flag, field in fields.items():
        value = getattr(args, field.replace(".", "_"), None)
        if value is None:
            continue
        other = dict(overrides).get(field, value)
        if other != value:
            raise ConfigError(f"--{flag} {value} and --{field} {other} are the same setting: leave one out")
        found.append((field, value))
    if args.command == "play" and "environment.prompt" not in dict([*overrides, *found]):
        found.append(("environment.prompt", "full"))  # people read the full wording, whatever the policy reads
    return found


def _config(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> RunConfig:
    """The configuration of a command: --config, or the one of the run it works on, or the defaults; then overrides."""
    run = _run_of(args) if args.config is None else None
    if run is None:
        return config_io.load(args.config, overrides)
    stored_config(run)  # refuses a damaged one
    return config_io.load(run / "config.yaml", overrides)


def _run_of(args: argparse.Namespace) -> Path | None:
    """The run whose configuration a command starts from, None for commands that begin with none."""
    if args.command in ("simulate", "inspect", "certify", "bench"):
        return None
    if args.command == "play":
        return args.run_dir
    init = getattr(args, "init", None)
    continues = args.command in ("grpo", "eval", "export", "report") or args.resume
    run = init or (args.run_dir if continues else None)
    if run is None and continues and getattr(args, "agent", None) != "analyst":
        raise ConfigError("which run? give its directory with --run-dir")
    return run


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _machine(error: OSError, argv: Sequence[str]) -> str:
    """One line for an error of the file system: what, where, and the mend that fits the command."""
    where = error.filename or "standard output"
    if error.errno in _NO_SPACE:
        resumes = _command(argv) in _TRAINING and error.filename
        mend = f"free some space and {'continue with --resume' if resumes else 'run the command again'}"
    elif error.errno in _NO_PERMISSION:
        mend = "make it writable or choose another place"
    else:
        mend = "choose another path"
    return f"cannot write {where}: {os.strerror(error.errno).lower()}; {mend}"


def _command(argv: Sequence[str]) -> str | None:
    return next((w for w in argv if not w.startswith("-")), None)


def _mute() -> None:
    """What could not be written to standard output is not tried again at exit, which would add a traceback."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    if argv is None:
        status = main(sys.argv[1:])
        if status in _INTERRUPTED:
            # Threads may still be in the middle of something that teardown of the interpreter would trip over.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        return status
    argv = list(argv)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {_one_line(message)}\n"
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: what would be said there is lost, the work is not
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows `?` for what it lacks
    try:
        # Commands that look at the request themselves; it may arrive while their modules are still being loaded.
        with Interrupt() if _command(argv) in _STOPPABLE else contextlib.nullcontext():
            status = _run(argv)
        sys.stdout.flush()  # here, where a full disk can still be reported
        return status
    except ConfigError as error:
        print(f"trace-jax: {_one_line(error)}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        again = [*argv, *(["--resume"] if _command(argv) == "simulate" and "--resume" not in argv else [])]
        verb = "continue" if _command(argv) in (*_TRAINING, "simulate") else "start again"
        print(f"interrupted; {verb} with: {stop.resume or shlex.join(['trace-jax', *again])}", file=sys.stderr)
        return stop.status
    except KeyboardInterrupt:
        print(f"interrupted; start again with: {shlex.join(['trace-jax', *argv])}", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the output has seen enough
        _mute()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _MACHINE_ERRORS:
            traceback.print_exc()
            return 1
        if not error.filename:
            _mute()
        print(f"trace-jax: {_one_line(_machine(error, argv))}", file=sys.stderr)
        return 2
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            print(f"trace-jax: {_MEMORY}", file=sys.stderr)
            return 2
        traceback.print_exc()
        print(f"trace-jax: failed: {_one_line(error) or type(error).__name__}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
