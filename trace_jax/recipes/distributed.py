"""Several JAX processes as one job: how they find each other, and how they end together.

A training command, or an evaluation, that a launcher started several times joins the others here, before any device is
used; other commands refuse to be several. What says that there are several, in this order:

    TRACE_JAX_DISTRIBUTED=0       nothing: this process works alone
    TRACE_JAX_PROCESSES, TRACE_JAX_PROCESS, TRACE_JAX_COORDINATOR
                                  how many, which one (from 0), host:port of process 0 (launch/local.py, a JobSet)
    TRACE_JAX_DISTRIBUTED=1       there are several, JAX finds out the rest (a TPU pod slice: metadata of the machines)
    variables of Slurm (`srun`), Open MPI (`mpirun`) or a TPU slice on GKE with more than one process
                                  JAX finds out the rest

Otherwise nothing happens. Afterwards a thread watches: a process that fails says so and the others end within seconds;
one that is told to stop says that, too; one that vanishes is missed by JAX's heartbeats after `HEARTBEAT_SECONDS`; one
that is slow is named by process 0.

Loads JAX only when there are several processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from trace_jax.config import ConfigError

HEARTBEAT_SECONDS = 30  # without a sign of life, then JAX ends all processes
START_SECONDS = 300  # for all processes to be there
END_SECONDS = 60  # for all processes to have finished
POLL_SECONDS = 1.0
SLOW_SECONDS = 60.0  # a wait for other processes is reported after it, and each time it has doubled
SPREAD_SECONDS = 10.0  # process 0 stays so long for the others to read why it ends
FAILED, READ, STOP = "trace_jax_failed/", "trace_jax_read/", "trace_jax_stop/"

OWN = ("TRACE_JAX_PROCESSES", "TRACE_JAX_PROCESS", "TRACE_JAX_COORDINATOR")
SWITCH = "TRACE_JAX_DISTRIBUTED"


@dataclass(frozen=True)
class Declared:
    """What the environment says about several processes.

    Attributes:
        by: who says so.
        arguments: of `jax.distributed.initialize`; what is missing JAX finds out.
    """

    by: str
    arguments: dict[str, Any] = field(default_factory=dict)


def declared(environment: Mapping[str, str]) -> Declared | None:
    """Whether this process is one of several; None: it works alone.

    Raises:
        ConfigError: variables that contradict each other or are no numbers.
    """
    switch = environment.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH} is {switch!r}: 0 (alone) or 1 (one of several)")
    if switch == "0":
        return None
    if any(name in environment for name in OWN):
        return _own(environment)
    if switch == "1":
        return Declared(SWITCH)
    if _number(environment, "SLURM_STEP_NUM_TASKS") > 1:
        devices = _slurm_devices(environment)
        return Declared("Slurm", {} if devices is None else {"local_device_ids": devices})
    if _number(environment, "OMPI_COMM_WORLD_SIZE") > 1:
        return Declared("Open MPI")
    workers = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    if "," in workers or _number(environment, "MEGASCALE_NUM_SLICES") > 1:
        return Declared("a TPU slice")
    return None


def _own(environment: Mapping[str, str]) -> Declared | None:
    if missing := [name for name in OWN if not environment.get(name)]:
        raise ConfigError(f"{missing[0]} is not set: {', '.join(OWN)} go together")
    count, index = (_number(environment, name, wanted=True) for name in OWN[:2])
    if not 0 <= index < count:
        raise ConfigError(f"{OWN[1]} is {index}: it counts from 0 to {OWN[0]} - 1, here {count - 1}")
    if count == 1:
        return None
    address = environment[OWN[2]]
    if not address.rpartition(":")[2].isdigit() or not address.rpartition(":")[0]:
        raise ConfigError(f"{OWN[2]} is {address!r}: host:port of process 0")
    arguments = {"coordinator_address": address, "num_processes": count, "process_id": index}
    return Declared(OWN[0], arguments | {"cluster_detection_method": "deactivate"})


def _number(environment: Mapping[str, str], name: str, wanted: bool = False) -> int:
    """A variable's number; 0 where it is missing, or is none and is not `wanted`."""
    try:
        return int(environment.get(name) or 0)
    except ValueError:
        if wanted:
            raise ConfigError(f"{name} is {environment[name]!r}: a number") from None
        return 0


def _slurm_devices(environment: Mapping[str, str]) -> list[int] | None:
    """GPUs of this task of a node: an equal share of those it sees, all when Slurm bound it to fewer than there are
    tasks. JAX by itself gives every task one, also the only task of a node. None: no GPU, or the user has chosen."""
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    there = _number(environment, "SLURM_GPUS_ON_NODE") if visible is None else len([d for d in visible.split(",") if d])
    tasks, mine = _number(environment, "SLURM_NTASKS_PER_NODE"), _number(environment, "SLURM_LOCALID")
    if not tasks:  # "2(x4),1": on each node of the step; it is spread evenly or a mesh does not fit
        text = environment.get("SLURM_STEP_TASKS_PER_NODE", "").split("(")[0].split(",")[0]
        tasks = int(text) if text.isdigit() else 1
    if not there:
        return None
    share = there // tasks
    return list(range(there)) if not share else list(range(mine * share, (mine + 1) * share))


def several() -> bool:
    """Whether this is one of several processes."""
    if "jax" not in sys.modules:
        return False
    from trace_jax.learner import multihost

    return multihost.count() > 1


def leads() -> bool:
    """Whether this process is the one that writes what is written once and talks to the user."""
    if not several():
        return True
    from trace_jax.learner import multihost

    return multihost.index() == 0


_watch: _Watch | None = None
_heard: int | None = None  # signal


def refuse_several(command: str) -> None:
    """For a command that one process does.

    Raises:
        ConfigError: the environment declares several, which would all do the same.
    """
    if (found := declared(os.environ)) is not None:
        raise ConfigError(
            f"`{command}` works in one process, and {found.by} declares several, which would all do the same: start it "
            f"once, or set {SWITCH}=0"
        )


def join() -> None:
    """Joins the other processes if the environment declares some, and watches them from now on.

    Raises:
        ConfigError: they do not come together.
    """
    global _watch
    found = declared(os.environ)
    if found is None or several():
        return
    import jax

    # Its handler of SIGTERM would take the place of ours (`interrupt`), and what it knows is agreed upon there.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **found.arguments,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=END_SECONDS,
        )
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise ConfigError(
            f"the processes that {found.by} declares do not come together ({' '.join(str(error).split())[:300]}): "
            f"start all of them with the same command, or set {SWITCH}=0 to work alone"
        ) from error
    state = jax._src.distributed.global_state  # noqa: SLF001 - the public names start the devices
    _watch = _Watch(state.process_id, state.num_processes)
    _watch.start()


def hear(number: int) -> None:
    """This process was told to stop by a signal, and the watch will tell the others. For a signal's handler."""
    global _heard
    _heard = number


def announced() -> int | None:
    """The signal that some process has heard, a second or two after it did."""
    return None if _watch is None else _watch.announced


def leave(status: int, message: str = "") -> None:
    """Ends the process, one of several. After success, or when a signal stopped all of them, the processes wait for
    each other; a failure is told to the others first. Alone, it returns and does nothing."""
    if _watch is None:
        return
    _watch.stop()
    if status in (0, 130, 143):
        from trace_jax.learner import multihost

        with contextlib.suppress(Exception):  # another one ended already; all that is to be kept is on disk
            multihost.part()
    else:
        _watch.tell(status, message)
    end_now(status)


def end_now(status: int) -> None:
    """Ends the process whatever its threads are doing, and its worker processes."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


class _Watch(threading.Thread):
    """Looks for messages of processes that failed, and says whom this one has been waiting for."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__(name="processes", daemon=True)
        self._index, self._count = index, count
        self._stopped = threading.Event()
        self.announced: int | None = None
        self._reported: dict[str, float] = {}  # wait -> seconds after which it is reported next

    def stop(self) -> None:
        self._stopped.set()

    def tell(self, status: int, message: str) -> None:
        """Lets the other processes know why this one ends."""
        from trace_jax.learner import multihost

        with contextlib.suppress(Exception):  # the coordinator is gone: so are, soon, the others
            client, index = multihost.client(), self._index
            client.key_value_set(f"{FAILED}{index:06d}", json.dumps([status, message]), allow_overwrite=True)
            client.key_value_set(f"{READ}{index:06d}", "")
            until = time.monotonic() + SPREAD_SECONDS
            while not index and time.monotonic() < until:
                if len(client.key_value_dir_get(READ)) == self._count:
                    return
                time.sleep(0.1)

    def run(self) -> None:
        from trace_jax.learner import multihost

        lost = 0
        while not self._stopped.wait(POLL_SECONDS):
            try:
                client = multihost.client()
                if _heard is not None and self.announced is None:
                    client.key_value_set(f"{STOP}{self._index:06d}", str(_heard), allow_overwrite=True)
                stops = client.key_value_dir_get(STOP)
                self.announced = int(stops[0][1]) if stops else None
                failures = client.key_value_dir_get(FAILED)
                if self._index == 0:
                    self._report(multihost.awaited())
                lost = 0
            except Exception as error:
                lost += 1
                if lost == 3 and not self._stopped.is_set():  # not a moment's trouble of the network
                    self._end(1, f"process 0 is gone ({' '.join(str(error).split())[:200]})")
                continue
            for key, text in sorted(failures):
                if (process := int(key.rsplit("/", 1)[1])) != self._index and not self._stopped.is_set():
                    status, message = json.loads(text)
                    with contextlib.suppress(Exception):
                        multihost.client().key_value_set(f"{READ}{self._index:06d}", "")
                    self._end(status, f"process {process} failed: {message}")

    def _end(self, status: int, text: str) -> None:
        with contextlib.suppress(Exception):
            print(f"trace-jax: {text}", file=sys.stderr, flush=True)
        end_now(status)

    def _report(self, waits: list[tuple[str, float, list[int]]]) -> None:
        for name, seconds, missing in waits:
            due = self._reported.get(name, SLOW_SECONDS)
            if seconds < SLOW_SECONDS:
                self._reported.pop(name, None)
            elif seconds >= due and missing:
                self._reported[name] = 2 * due
                who = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                text = f"waiting for process {who} for {seconds:.0f} s ({name}): see logs/ of the run"
                print(text, file=sys.stderr, flush=True)


# Logs


class _Tee(io.TextIOBase):
    """A stream whose text goes to a file as well."""

    def __init__(self, stream: TextIO, file: TextIO):
        self._stream, self._file = stream, file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # a log that cannot be written is no reason to stop
            self._file.write(text)
            self._file.flush()
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return self._stream.encoding


def open_log(run: Path) -> TextIO | None:
    """From now on what this process says is also in `logs/process-N.log` of the run. None when it is alone.

    Returns:
        the file, for what only it shall have.
    """
    if not several():
        return None
    from trace_jax.learner import multihost

    folder = run / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / f"process-{multihost.index()}.log", "a", encoding="utf-8", errors="replace")  # noqa: SIM115
    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {multihost.index()} of {multihost.count()}\n")
    file.flush()
    sys.stdout, sys.stderr = _Tee(sys.stdout, file), _Tee(sys.stderr, file)
    return file
