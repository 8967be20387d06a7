"""The work of a run on several processes: what one does for all, and what each does a share of.

Every process runs the same recipe. The learner's programs run on all devices, so all processes call it alike with the
same micro-batches (`learner.sharding.place_batch`). Each samples its own share of the trajectories, on its own devices
and with its own tool workers; then all read the whole. Where sampling lanes lie in several processes, those that lead
them have shares. Process 0 alone writes to the run directory. One process pays nothing.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from trace_jax.config import ConfigError, RunConfig
from trace_jax.learner import multihost
from trace_jax.recipes import distributed
from trace_jax.recipes.interrupt import Interrupt, Interrupted
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory, default_path
from trace_jax.rollout.collect_stats import CollectStats, side_by_side
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.placement import HostOf, owners, process_of
from trace_jax.rollout.trajectory import Trajectory, read_parquet, write_parquet

T = TypeVar("T")
SHARES = ".shares"  # folder of a run: trajectories on their way from one process to the others

_rounds: Counter[str] = Counter()


class Follower(RunDirectory):
    """The run directory as all processes but the first have it: to read."""

    def __init__(self, path: Path, config: RunConfig, *, lock: bool = True):
        super().__init__(path, config, lock=False)

    def write_text(self, name: str, text: str) -> Path:
        return self.path / name

    def log(self, stage: str, step: int, metrics: dict[str, Any]) -> None:
        pass

    def truncate(self, stage: str, step: int) -> None:
        pass

    def track(self, service: str | None) -> None:
        pass


def open_run(
    path: Path | None, config: RunConfig, open_it: Callable[[Path | None], RunDirectory], new: bool
) -> RunDirectory:
    """The run directory that process 0 opens or makes with `open_it(path)`; of the others a `Follower`.

    Args:
        new: without a path it gets the name that new runs get.

    Raises:
        ConfigError: a bucket that is not mounted; in all processes what `open_it` raised; or the others do not see the
            directory.
    """
    if path is not None and re.match(r"[a-z0-9]+:/", str(path)):
        given = str(path).replace(":/", "://", 1)  # a path has one slash of them
        raise ConfigError(
            f"--run-dir {given} is no directory: mount the bucket, as launch/worker.sh does, and name a path"
        )
    if multihost.count() == 1:
        return open_it(path)
    held: list[RunDirectory] = []

    def lead() -> str:
        run = open_it(default_path(config) if path is None and new else path)
        held.append(run)
        shutil.rmtree(run.path / SHARES, ignore_errors=True)  # of a job that was killed
        return str(run.path.absolute())

    place = Path(multihost.first("run", lead))

    def follow() -> None:
        if not held:
            if not (place / "config.yaml").is_file():
                raise ConfigError(
                    f"process {multihost.index()} does not see {place}: several processes need a run directory on a "
                    "file system that they share (NFS, Lustre, a mounted bucket)"
                )
            held.append(Follower.open(place))

    multihost.together("run-seen", follow)
    return held[0]


def progress(run: RunDirectory) -> Progress:
    """Where a stage reports to: the terminal, of processes but the first their log."""
    file = distributed.open_log(run.path)
    return Progress() if file is None or distributed.leads() else Progress(Console(file=file))


def check(config: RunConfig) -> None:
    """Refuses what several processes cannot do.

    Raises:
        ConfigError: the field.
    """
    if multihost.count() == 1:
        return
    grpo = config.grpo
    if grpo.staleness and (grpo.weight_sync == "in_flight" or grpo.turn_credit.enabled):
        what = "turn_credit.enabled" if grpo.turn_credit.enabled else "weight_sync` in_flight, `grpo.staleness"
        raise ConfigError(
            f"`grpo.{what}` with `grpo.staleness` {grpo.staleness} needs one process: programs of all devices would "
            "start in another order in each process; set the staleness to 0, or leave the other out"
        )
    if config.mesh.rollout_devices:
        raise ConfigError(
            f"`mesh.rollout_devices` ({config.mesh.rollout_devices}) needs one process: set it to 0, so that all "
            "devices learn and sample in turn"
        )


def check_lanes(config: RunConfig, mesh: Mesh, host_of: HostOf = process_of) -> None:
    """Refuses sampling beside learning where lanes lie in several processes.

    Args:
        mesh: the sampler's.
        host_of: the process that has a device.

    Raises:
        ConfigError: the field.
    """
    staleness, across = config.grpo.staleness, max(map(len, owners(mesh, host_of)))
    if staleness and across > 1:
        lane = f"`mesh.tensor` x `mesh.expert` = {mesh.shape['tensor']} x {mesh.shape['expert']}"
        raise ConfigError(
            f"`grpo.staleness` is {staleness}, and the devices of a sampling lane ({lane}) lie in {across} processes: "
            "programs of the lane and of the learner would start in another order in each; set the staleness to 0, or "
            "make lanes that fit the devices of one process"
        )


def introduce(mesh: Mesh) -> None:
    """Has every group of devices along the mesh's axes communicate once. On CPU (gloo) processes have 30 s to meet when
    a group does so for the first time, which one that compiles for longer would miss; later they may be as late as they
    like."""
    axes = [name for name, size in mesh.shape.items() if size > 1]
    if multihost.count() == 1 or not axes or jax.default_backend() != "cpu":
        return
    groups = [group for n in range(1, len(axes) + 1) for group in itertools.combinations(axes, n)]
    whole = NamedSharding(mesh, PartitionSpec())
    one = jax.make_array_from_callback((), whole, lambda _: np.ones((), np.float32))
    met = jax.shard_map(
        lambda x: [jax.lax.psum(x, group) for group in groups],
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    program = jax.jit(met).lower(one).compile()
    multihost.gather("introduce", None)
    jax.block_until_ready(program(one))


def lead(interrupt: Interrupt, name: str, work: Callable[[], T]) -> T:
    """What `work` returns in process 0, which alone does it: JSON-able.

    Raises:
        Interrupted: a signal reached process 0; in all.
        ConfigError, Exception: see `multihost.together`.
    """
    if multihost.count() == 1:
        return work()

    def attempt() -> list[Any]:
        try:
            with interrupt.alone():
                return [0, work()]
        except Interrupted as stop:
            return [stop.status, None]

    status, result = multihost.first(name, attempt)
    if status:
        raise Interrupted(status)
    return result


def in_turn(interrupt: Interrupt, name: str, work: Callable[[], T]) -> T:
    """What `work` returns in each process; the first does it before the others, which find made what it keeps on disk.
    Raises what `lead` does."""
    if multihost.count() == 1:
        return work()
    held: list[T] = []
    lead(interrupt, name, lambda: held.append(work()))
    return held[0] if held else work()


def shared(
    run: RunDirectory,
    interrupt: Interrupt,
    name: str,
    collect: Callable[[CollectStats, tuple[int, int]], list[Trajectory]],
    engine: Engine,
    stats: CollectStats | None = None,
) -> list[Trajectory]:
    """All trajectories of a collection of which each process collects its share.

    Args:
        name: all processes call in the same order for one name.
        engine: that samples; it knows the share of this process, and follows those that lead its other lanes.
        collect: (figures to fill, (which share, how many there are)) -> its trajectories.
        stats: what all of them together spent is added to it.

    Raises:
        Interrupted: a signal reached one of the processes meanwhile; in all.
    """
    own = CollectStats()
    if multihost.count() == 1:
        found = collect(own, (0, 1))
        if stats is not None:
            stats.add(own)
        return found
    status, found, index = 0, [], multihost.index()
    engine.follow()
    if engine.share is not None:
        try:
            with interrupt.alone():
                found = collect(own, engine.share)
        except Interrupted as stop:
            status = stop.status
    engine.followed()  # those that lead hear of a signal, too, and end
    this = _rounds[name]
    _rounds[name] += 1
    folder = run.folder(SHARES)
    write_parquet(_share(folder, name, this, index), found)
    told = multihost.gather(name, [status, len(found), vars(own)])
    if this:  # all have read the round before, or they would not be here
        _share(folder, name, this - 1, index).unlink(missing_ok=True)
    if stop := max(status for status, *_ in told):
        raise Interrupted(stop)
    if stats is not None:
        stats.add(side_by_side([CollectStats(**spent) for *_, spent in told]))
    whole = []
    for process, (_, count, _) in enumerate(told):
        part = read_parquet(path := _share(folder, name, this, process))
        if len(part) != count:
            raise RuntimeError(f"{path} has {len(part)} trajectories, process {process} wrote {count}")
        whole += part
    return whole


def _share(folder: Path, name: str, this: int, process: int) -> Path:
    return folder / f"{name}-{this:08d}-{process:06d}.parquet"
