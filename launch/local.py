#!/usr/bin/env python3
"""Runs a `trace-jax` training command, or `eval`, as several processes on this machine.

    python launch/local.py --processes 4 --devices-per-process 2 -- train --config configs/nano.yaml --run-dir runs/a

SIGTERM and Ctrl-C go on to all processes, which save and end alike; a second one ends them at once. When one process
ends badly, the others are given `--patience` seconds to end by themselves and are then killed. With `--restarts N` the
job is then begun again, at most N times, from its last checkpoint: the same command with --resume (and without --init)
once the run directory holds a run. Bad input (status 2) is not tried again.

Exit status: 0 when all succeeded, else that of the process that ended badly first (128 + signal if one killed it).
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

COMMAND = [sys.executable, "-m", "trace_jax.cli"]
PATIENCE = 40.0  # seconds; the whole job is to end within 60 of the first failure


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    p.add_argument("--processes", type=_positive, required=True, metavar="N")
    p.add_argument("--devices-per-process", type=_positive, metavar="K", help="default: 1")
    p.add_argument("--platform", choices=("cpu", "cuda"), default="cpu", help="cpu: virtual devices (the default)")
    p.add_argument("--restarts", type=int, default=0, metavar="N", help="begin again so often after a failure")
    p.add_argument("--patience", type=float, default=PATIENCE, metavar="SECONDS", help=f"default: {PATIENCE:g}")
    p.add_argument("--cache", metavar="DIR", help="keep compiled programs there, shared by all processes")
    p.add_argument("--dry-run", action="store_true", help="print what would be run and stop")
    p.add_argument("arguments", nargs=argparse.REMAINDER, help="-- and train, sft, grpo or eval with its flags")
    return p


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def environment(index: int, args: argparse.Namespace, port: int) -> dict[str, str]:
    """Variables of process `index` beside those of this one."""
    devices = args.devices_per_process or 1
    own = {
        "TRACE_JAX_PROCESSES": str(args.processes),
        "TRACE_JAX_PROCESS": str(index),
        "TRACE_JAX_COORDINATOR": f"127.0.0.1:{port}",
    }
    if args.platform == "cpu":
        own |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    else:
        own["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(index * devices, (index + 1) * devices)))
    if args.cache:
        own["JAX_COMPILATION_CACHE_DIR"] = args.cache
    return own


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """What a flag is given: `--flag value` or `--flag=value`."""
    for i, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else next(iter(arguments[i + 1 :]), None)
    return None


def resuming(arguments: Sequence[str]) -> list[str]:
    """The command that goes on with a run: --resume, and no --init, which begins one."""
    if arguments[0] == "eval":  # begins again: nothing was kept
        return list(arguments)
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--init":
            next(words, None)
        elif not word.startswith("--init="):
            kept.append(word)
    return kept if "--resume" in kept else [*kept, "--resume"]


def holds_run(arguments: Sequence[str]) -> bool:
    run = value_of(arguments, "--run-dir")
    return run is not None and (Path(run) / "config.yaml").is_file()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Job:
    """The processes of one attempt."""

    def __init__(self, arguments: Sequence[str], args: argparse.Namespace):
        port = free_port()
        self.patience = args.patience
        self.processes: list[subprocess.Popen] = []
        self.readers: list[threading.Thread] = []
        for index in range(args.processes):
            process = subprocess.Popen(
                [*COMMAND, *arguments],
                env={**os.environ, **environment(index, args, port)},
                start_new_session=True,  # a terminal's Ctrl-C reaches this process, which passes it on
                stdout=None if index == 0 else subprocess.PIPE,
                stderr=None if index == 0 else subprocess.STDOUT,
            )
            self.processes.append(process)
            if index:
                self.readers.append(threading.Thread(target=self._show, args=(index, process), daemon=True))
                self.readers[-1].start()

    @staticmethod
    def _show(index: int, process: subprocess.Popen) -> None:
        for line in process.stdout:
            sys.stderr.write(f"[{index}] {line.decode(errors='replace')}")
            sys.stderr.flush()

    def send(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> int:
        """Status of the first process that ended badly, 0 when none did; all have ended."""
        first, deadline = 0, None
        while any(p.poll() is None for p in self.processes):
            bad = [p.returncode for p in self.processes if p.poll() is not None and p.returncode]
            if bad and deadline is None:
                first, deadline = bad[0], time.monotonic() + self.patience
                told = "; the others are given" if first not in (130, 143) else "; waiting for the others"
                which = next(i for i, p in enumerate(self.processes) if p.returncode == first)
                print(f"local.py: process {which} ended: {_said(first)}{told} {self.patience:g} s", file=sys.stderr)
            if deadline is not None and time.monotonic() > deadline:
                for process in self.processes:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.1)
        for reader in self.readers:
            reader.join(5)
        return first or next((p.returncode for p in self.processes if p.returncode), 0)


def _said(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def run(arguments: list[str], args: argparse.Namespace, begin: Callable[..., Job] = Job) -> int:
    """Runs the job until it succeeds, is stopped, or has used its restarts; returns the exit status."""
    asked: list[int] = []
    job: Job | None = None

    def forward(number: int, frame) -> None:
        asked.append(number)
        if job is not None:
            job.send(number)

    before = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        for attempt in range(args.restarts + 1):
            command = resuming(arguments) if attempt and holds_run(arguments) else arguments
            job = begin(command, args)
            if asked:  # while it was being started
                job.send(asked[-1])
            status = job.wait()
            if status == 0 or asked or status == 2 or attempt == args.restarts:
                break
            print(f"local.py: restart {attempt + 1} of {args.restarts}", file=sys.stderr)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    if arguments[:1] not in (["train"], ["sft"], ["grpo"], ["eval"]):
        print("local.py: give `--` and then train, sft, grpo or eval with its flags", file=sys.stderr)
        return 2
    if args.restarts and value_of(arguments, "--run-dir") is None:
        print("local.py: --restarts needs the command's --run-dir, to go on in it", file=sys.stderr)
        return 2
    if not args.dry_run:
        return run(arguments, args)
    for index in range(args.processes):
        own = environment(index, args, 0)
        own["TRACE_JAX_COORDINATOR"] = "127.0.0.1:<a free port>"
        print(" ".join(f"{k}={shlex.quote(v)}" for k, v in own.items()), shlex.join([*COMMAND, *arguments]))
    if args.restarts:
        print(f"at most {args.restarts} restarts with:", shlex.join([*COMMAND, *resuming(arguments)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
