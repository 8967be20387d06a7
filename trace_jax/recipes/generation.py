"""Sampling for the steps to come, beside learning.

Collections run one after another in a thread of their own. Collection `k` (of optimizer step `k`, from 0) is sampled
with the parameters of version `max(0, k - staleness)`, version `v` being those after `v` steps; with staleness 1 it is
therefore under way while step `k - 1` is being learned. As a whole collection has one version, the trajectories of a
step are the same whatever the timing, and an interrupted run can be repeated exactly. With `weight_sync: in_flight` it
takes up new parameters as they come instead: fresher, and different in every run.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trace_jax.config import ConfigError, RunConfig
from trace_jax.learner import groups, multihost
from trace_jax.learner.step import Params
from trace_jax.recipes import gating, processes, schedule
from trace_jax.recipes.phases import PhaseTimer
from trace_jax.recipes.turn_probe import TurnProbe
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.collect import CollectStats, collect, metrics
from trace_jax.rollout.engine import EngineStats
from trace_jax.rollout.sampling import Sampling
from trace_jax.rollout.trajectory import Trajectory, read_parquet, write_parquet

VALIDATION = "validation"
SPOILT_SECONDS = 5.0


class _Closed(Exception):
    """The run ends; what is being collected is not needed any more."""


@dataclass(frozen=True)
class Collection:
    """What optimizer step `step` (from 0) learns from.

    Attributes:
        version: of the parameters that began it.
        figures: to log.
        ended: `time.monotonic()` of its end.
    """

    step: int
    version: int
    trajectories: list[Trajectory]
    figures: dict[str, float]
    ended: float = 0.0


class Generation:
    """Collects for GRPO. A context manager: leaving it ends what is under way."""

    def __init__(self, work: Workspace, stage: str, probe: TurnProbe | None = None):
        """
        Args:
            probe: asked about every trajectory to learn from.
        """
        self._work, self._stage, self._config, self._probe = work, stage, work.config.grpo, probe
        environment = work.environment("train")
        self._count = len(environment)
        self._quiet: list[int] = []
        if self._config.no_signal_share:
            self._quiet = [i for i in range(self._count) if environment.task(i).labels["type"] == "no_signal"]
            check_no_signal(work.config, self._count, self._quiet)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="generation")
        self._closing = threading.Event()
        self._params: dict[int, Params] = {}
        self._placed: dict[int, list[Any]] = {}  # the same for the sampler, with several processes
        self._futures: dict[int, Future[Collection]] = {}
        self._swap = threading.Lock()
        self._open_to_swaps = False

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc) -> None:
        self._closing.set()
        # With several processes the thread may wait for others, whose threads have not begun what this one has.
        self._pool.shutdown(wait=multihost.count() == 1, cancel_futures=True)

    # Parameters

    def publish(self, params: Params, version: int) -> None:
        """New parameters of the learner; with a staleness they are copied, since the next step donates them."""
        if self._config.staleness:
            params = jax.tree.map(lambda x: x.copy(), params)
            jax.block_until_ready(params)  # the copy is made before the buffers are given away
        self._keep(params, version)
        for old in [v for v in self._params if v < version - self._config.staleness]:
            del self._params[old]
            self._placed.pop(old, None)
        with self._swap:
            if self._open_to_swaps:
                self._use(version)

    def _keep(self, params: Params, version: int) -> None:
        self._params[version] = params
        if multihost.count() > 1:
            # Here, in the thread that learns: the one that collects runs no program that needs other processes, or the
            # order of such programs would differ between them.
            self._placed[version] = self._work.engine.place(params)

    def _use(self, version: int) -> None:
        """Has the sampler draw with these parameters from now on."""
        if version in self._placed:
            self._work.engine.use(self._placed[version], version)
        else:
            self._work.engine.set_params(self._params[version], version)

    def version_of(self, step: int) -> int:
        """The version that collection `step` begins with."""
        return max(0, step - self._config.staleness)

    # Collections

    def ask(self, step: int) -> None:
        """Has a step collected for after those asked for before, unless it was asked for or there is no such step."""
        if step < self._config.steps and step not in self._futures:
            self._futures[step] = self._pool.submit(self._collection, step)

    def take(self, step: int) -> Collection:
        """What was collected for a step; waits for it.

        Raises:
            Interrupted: a signal arrived meanwhile; the collection is lost.
        """
        collected = self._futures[step].result()
        del self._futures[step]
        return collected

    def validate(self, version: int) -> dict[str, float]:
        """Figures of the first validation episodes, sampled as `evaluation` says; waits for them."""
        return self._pool.submit(self._validation, version).result()

    def _collection(self, step: int) -> Collection:
        config = self._work.config
        in_flight = self._config.weight_sync == "in_flight"
        version = max(self._params) if in_flight else self.version_of(step)
        with self._swap:
            self._use(version)
            self._open_to_swaps = in_flight
        try:
            stats, before = CollectStats(), self._work.engine.stats
            tasks = prompts(config, step, self._count, self._quiet)
            trajectories = self._collect("train", tasks, self._config.group, self._stage, step, stats)
            rounds, pays = 0, self._config.turn_credit.pays
            while rounds < self._config.resample_limit:
                wanted = groups.missing(trajectories, self._config, config.rollout.context, pays)
                more = further_prompts(config, step, self._count, tasks, wanted)
                if not more:  # enough, or no prompt is left
                    break
                rounds += 1
                # other keys than those of the prompts that they replace
                found = self._collect("train", more, self._config.group, f"{self._stage}-{rounds}", step, stats)
                trajectories += [dataclasses.replace(t, group=len(tasks) + t.group) for t in found]
                tasks = tasks + more
        finally:
            with self._swap:
                self._open_to_swaps = False
        figures = _figures(trajectories, stats, self._engine_figures(before))
        figures |= gating.figures(trajectories, config.lora.gate)
        figures["resample_collections"] = float(rounds)
        if not self._config.staleness:  # nothing is sampled until there are other parameters: the learner has the room
            self._work.engine.free()
            self._placed.pop(version, None)
        if self._probe is not None:
            trajectories, figures["seconds/probe"] = self._probe(trajectories, self._work.environment("train"))
        return Collection(step, version, trajectories, figures, time.monotonic())

    def _validation(self, version: int) -> dict[str, float]:
        config = self._config
        with self._swap:
            self._use(version)
        stats, before = CollectStats(), self._work.engine.stats
        trajectories = self._collect(
            VALIDATION,
            range(config.validation_episodes),
            config.validation_samples,
            VALIDATION,
            version,
            stats,
            Sampling.of(self._work.config.evaluation),
        )
        return _figures(trajectories, stats, self._engine_figures(before))

    def _engine_figures(self, before: EngineStats) -> dict[str, float]:
        """Of the engines of all processes since an earlier look."""
        spent = multihost.gather("engine", vars(self._work.engine.stats.since(before)))
        return EngineStats(**{name: sum(part[name] for part in spent) for name in spent[0]}).figures()

    def _collect(
        self,
        split: str,
        tasks: Sequence[int],
        group: int,
        purpose: str,
        step: int,
        stats: CollectStats,
        sampling: Sampling | None = None,
    ) -> list[Trajectory]:
        work = self._work
        environment = work.environment(split)

        def part(spent: CollectStats, share: tuple[int, int]) -> list[Trajectory]:
            return collect(
                work.engine,
                work.chat,
                environment,
                list(tasks),
                group=group,
                config=work.config.rollout,
                seed=schedule.collection_seed(work.config.seed, purpose, step),
                step=step,
                sampling=sampling,
                stats=spent,
                progress=self._tick,
                hinted=round(self._config.hints * group) if split == "train" else 0,
                share=share,
            )

        return processes.shared(work.run, work.interrupt, "collect", part, work.engine, stats)

    def _tick(self, *_: object) -> None:
        # A terminal's Ctrl-C also reaches the tool's worker processes and may spoil what is being collected: it is
        # dropped, and a resumed run collects it again.
        self._work.interrupt.check()
        if self._closing.is_set():
            raise _Closed

    # What a checkpoint needs for an exact resume

    def pending(self, folder: Path) -> tuple[dict[str, Path], dict[str, Params], dict[str, Any]]:
        """Collections that were asked for and not taken yet.

        Returns:
            files for the checkpoint (written in `folder`): finished collections; items: the parameters that the others
            are to be sampled with; and their figures for its JSON.
        """
        files: dict[str, Path] = {}
        items: dict[str, Params] = {}
        told: dict[str, Any] = {}
        ready: dict[int, Collection] = {}
        for step, future in self._futures.items():
            collected = _result(future)
            # What ended together with a signal may be spoilt before the signal was noticed.
            late = self._work.interrupt.requested and collected and time.monotonic() - collected.ended < SPOILT_SECONDS
            if collected is not None and not late:
                ready[step] = collected
        everywhere = set.intersection(*map(set, multihost.gather("pending", list(ready))))
        for step in self._futures:
            if step in everywhere:
                collected = ready[step]
                name = f"pending-{step:06d}.parquet"
                write_parquet(folder / name, collected.trajectories, step)
                files[name] = folder / name
                told[str(step)] = {"version": collected.version, "figures": collected.figures}
            elif self._config.weight_sync == "between":
                version = self.version_of(step)
                if version in self._params and version != max(self._params):
                    items[f"version_{version}"] = self._params[version]
        return files, items, told

    def resume(
        self,
        read_file: Callable[[str], Path],
        read_item: Callable[[str], Params],
        step: int,
        told: Mapping[str, Any],
        params: Params,
    ) -> None:
        """Takes up what `pending` described.

        Args:
            read_file, read_item: find a file of the checkpoint, and parameters that it holds beside the newest.
            step: of GRPO, at which the parameters are `params`.
            told: the JSON of `pending`.
        """
        self.publish(params, step)
        for k in range(step, min(step + self._config.staleness, self._config.steps)):
            if str(k) in told:
                path = read_file(f"pending-{k:06d}.parquet")
                future: Future[Collection] = Future()
                future.set_result(Collection(k, told[str(k)]["version"], read_parquet(path), told[str(k)]["figures"]))
                self._futures[k] = future
                continue
            version = self.version_of(k)
            if version not in self._params and self._config.weight_sync == "between":
                self._keep(read_item(f"version_{version}"), version)
            self.ask(k)


def _result(future: Future[Collection]) -> Collection | None:
    """What a collection found, if it has ended well."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        return None
    return future.result()


def _figures(trajectories: Sequence[Trajectory], stats: CollectStats, engine: Mapping[str, float]) -> dict[str, float]:
    timer = PhaseTimer()
    timer.collected(stats)
    figures = metrics(trajectories, stats) | timer.take() | dict(engine)
    figures["rollout_tokens"] = figures.pop("tokens")  # the learner's `tokens` are those trained on
    right = float(np.mean([bool(t.info.get("full_right")) for t in trajectories]))
    return figures | {"full_right": right}


def check_no_signal(config: RunConfig, count: int, no_signal: Sequence[int]) -> None:
    """Refuses a `grpo.no_signal_share` that the training split cannot give.

    Args:
        count: episodes in the split. no_signal: those of them without a signal.

    Raises:
        ConfigError: a stage of it has fewer of them than a step would draw.
    """
    grpo, stages = config.grpo, max(len(config.data.curriculum), 1)
    wanted = math.ceil(grpo.no_signal_share * grpo.prompts)
    for stage in range(stages):
        low, high = (count * s // stages for s in (stage, stage + 1))
        found = sum(low <= i < high for i in no_signal)
        if found < wanted:
            where = f"stage {stage + 1} of `data.curriculum`" if stages > 1 else "the training split"
            raise ConfigError(
                f"`grpo.no_signal_share` {grpo.no_signal_share:g} of {grpo.prompts} prompts draws {wanted} no-signal "
                f"episodes a step, and {where} has {found}: lower it or raise `data.train`"
            )


def prompts(config: RunConfig, step: int, count: int, no_signal: Sequence[int]) -> list[int]:
    """Episodes of the training split for a step; with a curriculum those of its stage only."""
    low, high, first = _stage(config, step, count)
    quiet = [i - low for i in no_signal if low <= i < high]
    grpo = config.grpo
    chosen = schedule.grpo_prompts(config.seed, step - first, grpo.prompts, high - low, quiet, grpo.no_signal_share)
    return [low + i for i in chosen]


def further_prompts(config: RunConfig, step: int, count: int, used: Sequence[int], wanted: int) -> list[int]:
    """Episodes in the place of groups that teach nothing: a function of the seed, the step and what was used, apart
    from the order in which steps go through the split."""
    low, high, _ = _stage(config, step, count)
    free = sorted(set(range(low, high)) - set(used))
    order = schedule.stream(config.seed, "grpo-further", step, len(used)).permutation(len(free))
    return [free[i] for i in order[:wanted]]


def _stage(config: RunConfig, step: int, count: int) -> tuple[int, int, int]:
    stages = max(len(config.data.curriculum), 1)
    return schedule.curriculum(step, config.grpo.steps, stages, count)
