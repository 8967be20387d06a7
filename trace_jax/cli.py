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
import threading
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from trace_jax import cli_parser, config_io
from trace_jax.cli_commands import COMMANDS, dry_run
from trace_jax.cli_parser import ADS_ONLY, FIXED, SCRIPTED, TRAINING, command_of
from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_rules import require_environment
from trace_jax.recipes import distributed, shipped
from trace_jax.recipes.interrupt import Break, Interrupt, Interrupted
from trace_jax.recipes.rundir import stored_config

# The machine's limits, not faults of the program: reported as one line like any other bad input.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EROFS, errno.EACCES, errno.EPERM}
_BAD_PATH = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
_MACHINE_ERRORS = _NO_SPACE | _NO_PERMISSION | _BAD_PATH
_MEMORY = (
    "out of memory: lower rollout.slots, sft.microbatch.rows, grpo.microbatch.rows, simulator.batch, the sizes of the "
    "policy or those of the data"
)
_STOPPABLE = (
    *TRAINING,
    *("reproduce", "eval", "capability", "import", "export", "simulate", "inspect", "play", "certify", "fit-rules"),
    "compile",
)
_BREAKABLE = ("diagnose", "report")
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def _run(argv: Sequence[str]) -> int:
    parser = cli_parser.build()
    command = command_of(argv)
    if command is not None and command not in COMMANDS:
        meant = config_io.nearest(command, COMMANDS)
        mend = f"did you mean {meant}?" if meant else f"commands: {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {command}: {mend}")
    if command in FIXED and any(w.partition("=")[0] == "--config" for w in argv):
        raise ConfigError(f"`{command}` takes no --config: it uses that of the run")
    words, overrides = cli_parser.split_overrides(argv, cli_parser.flags(parser, argv))
    args = parser.parse_args(words)
    if command in FIXED and overrides:
        raise ConfigError(f"`{command}` takes no --{overrides[0][0]}: it uses the configuration of the run")
    if args.command is None:
        parser.print_help()
        return 2
    overrides += _short(args, overrides)
    args.overrides = overrides
    if args.command not in (*TRAINING, "eval"):
        distributed.refuse_several(args.command)
    config = None if args.command == "import" else _config(args, overrides)  # of the checkpoint, too: the recipe's work
    if args.command in ADS_ONLY:
        require_environment(config, "ads", args.command)
    if args.command in (*TRAINING, "eval"):
        distributed.join()
    result = dry_run(args, config) if getattr(args, "dry_run", False) else COMMANDS[args.command](args, config)
    if args.json and distributed.leads():
        print(json.dumps(result), flush=True)
    return int(args.command == "compile" and not result["fits"])


def _short(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The fields that commands have short flags for. ConfigError if the field itself is given another value."""
    found = []
    fields = {"seed": "data.seed", "difficulty": "simulator.difficulty", "style": "environment.prompt"}
    fields |= {"endpoint": "endpoint.url", "model": "endpoint.model", "set": "evaluation.set"}
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
    stored_config(run, "--init" if getattr(args, "init", None) else "--run-dir")  # refuses a damaged one
    return config_io.load(run / "config.yaml", overrides)


def _run_of(args: argparse.Namespace) -> Path | None:
    """The run whose configuration a command starts from, None for commands that begin with none."""
    if args.command in ("eval", "diagnose") and _ships(args):
        return shipped.FOLDER
    if args.command in ("simulate", "inspect", "certify", "bench", "compile"):
        return None
    if args.command in ("play", "fit-rules", "diagnose"):
        return args.run_dir
    if args.command == "reproduce":
        return args.init
    init = getattr(args, "init", None)
    continues = args.command in ("grpo", "eval", "capability", "export", "report") or args.resume
    run = init or (args.run_dir if continues else None)
    needs_one = getattr(args, "agent", None) not in SCRIPTED and not getattr(args, "dry_run", False)
    if getattr(args, "table", None):
        return None
    if getattr(args, "compare", None) or (args.command == "eval" and args.agent == "endpoint"):
        return run if run is not None and (run / "config.yaml").is_file() else None
    if run is None and continues and needs_one:
        raise ConfigError("which run? give its directory with --run-dir")
    return run


def _ships(args: argparse.Namespace) -> bool:
    """Whether the package's own policy is asked. ConfigError if this installation has none."""
    if getattr(args, "compare", None):
        return False
    default = args.command == "diagnose" and args.agent is None and not args.run_dir and shipped.there()
    wanted = args.agent == shipped.AGENT or default
    if wanted:
        shipped.manifest()
    return wanted


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _machine(error: OSError, argv: Sequence[str]) -> str:
    """One line for an error of the file system: what, where, and the mend that fits the command."""
    where = error.filename or "standard output"
    if error.errno in _NO_SPACE:
        resumes = command_of(argv) in TRAINING and error.filename
        mend = f"free some space and {'continue with --resume' if resumes else 'run the command again'}"
    elif error.errno in _NO_PERMISSION:
        mend = "make it writable or choose another place"
    else:
        mend = "choose another path"
    return f"cannot write {where}: {os.strerror(error.errno).lower()}; {mend}"


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
    status, message = _outcome(argv)
    if message:
        print(message, file=sys.stderr)
    distributed.leave(status, message.removeprefix("trace-jax: "))
    return status


def _outcome(argv: list[str]) -> tuple[int, str]:
    """Runs the command; its exit status, and the line for standard error if it did not end well."""
    try:
        with _interruptible(argv):
            status = _run(argv)
        sys.stdout.flush()  # here, where a full disk can still be reported
        return status, ""
    except ConfigError as error:
        return 2, f"trace-jax: {_one_line(error)}"
    except Interrupted as asked:
        data_set = command_of(argv) == "simulate" and not any(w.partition("=")[0] == "--export" for w in argv)
        again = [*argv, *(["--resume"] if data_set and "--resume" not in argv else [])]
        goes_on = command_of(argv) in (*TRAINING, "reproduce", "capability") or data_set or "endpoint" in argv
        verb = "continue" if goes_on else "start again"
        return asked.status, f"interrupted; {verb} with: {asked.resume or shlex.join(['trace-jax', *again])}"
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, _start_again(argv)
    except BrokenPipeError:  # the reader of the output has seen enough
        _mute()
        return 128 + signal.SIGPIPE, ""
    except OSError as error:
        if error.errno not in _MACHINE_ERRORS:
            traceback.print_exc()
            return 1, f"trace-jax: failed: {_one_line(error)}"
        if not error.filename:
            _mute()
        return 2, f"trace-jax: {_one_line(_machine(error, argv))}"
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return 2, f"trace-jax: {_MEMORY}"
        traceback.print_exc()
        return 1, f"trace-jax: failed: {_one_line(error) or type(error).__name__}"


def _interruptible(argv: list[str]) -> contextlib.AbstractContextManager:
    """What SIGINT and SIGTERM do during the command."""
    command = command_of(argv)
    if command in _STOPPABLE:  # looks at the request itself; it may arrive while modules are still being loaded
        return Interrupt()
    if command in _BREAKABLE:
        return Break(_start_again(argv))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return contextlib.nullcontext()


def _start_again(argv: list[str]) -> str:
    return f"interrupted; start again with: {shlex.join(['trace-jax', *argv])}"


if __name__ == "__main__":
    sys.exit(main())
