"""Which parameters sample what when generation runs ahead of learning, and what a checkpoint keeps of it."""

import dataclasses
import threading
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import RunConfig
from trace_jax.recipes import generation
from trace_jax.recipes.generation import Generation, further_prompts, prompts
from trace_jax.recipes.interrupt import Interrupted
from trace_jax.rollout.engine import EngineStats
from trace_jax.rollout.trajectory import Trajectory


class Engine:
    """Remembers which parameters it was given; its trajectories carry them as ids."""

    def __init__(self):
        self.value, self.version = None, None
        self.stats = EngineStats()
        self.freed = 0

    def set_params(self, params, version):
        self.value, self.version = int(params["w"]), version

    def free(self):
        self.value = None
        self.freed += 1


class Work:
    """As much of a workspace as collecting needs."""

    def __init__(self, **grpo):
        grpo = {"steps": 6, "prompts": 4, "group": 2} | grpo
        self.config = dataclasses.replace(RunConfig(), grpo=dataclasses.replace(RunConfig().grpo, **grpo))
        self.engine, self.chat, self.run = Engine(), None, None
        self.stop = None  # set to have the next look at the signals raise
        self.interrupt = SimpleNamespace(check=self._check, requested=False)

    def _check(self, *_):
        if self.stop is not None:
            raise self.stop

    def environment(self, split):
        return Split(split)


class Split:
    def __init__(self, split):
        self.split = split

    def __len__(self):
        return 40

    def task(self, i):
        return SimpleNamespace(labels={"type": "no_signal" if i % 5 == 0 else "mix"})


@pytest.fixture
def collector(monkeypatch):
    """Stands in for `collect`: (split, step, parameters, version) of every call; `gate` holds it back."""
    calls, gate = [], threading.Event()
    gate.set()
    rewards = {}  # task -> reward of the members of its group

    def collect(engine, chat, environment, tasks, *, group, step, stats, progress, **_):
        calls.append((environment.split, step, engine.value, engine.version))
        began = engine.value, engine.version
        while not gate.wait(0.01):
            progress()
        progress()
        return [
            Trajectory(
                ids=np.array([began[0], task, k], np.int32),
                loss_mask=np.array([False, True, True]),
                logprobs=np.array([0.0, -0.1, -0.30000001], np.float32),
                turn_index=np.array([-1, 0, 0], np.int32),
                versions=(began[1], engine.version),
                status="finished",
                task_index=task,
                group=g,
                sample=k,
                reward=rewards.get(task, (0.0, 1.0))[k],
            )
            for g, task in enumerate(tasks)
            for k in range(group)
        ]

    monkeypatch.setattr(generation, "collect", collect)
    return SimpleNamespace(calls=calls, gate=gate, rewards=rewards)


def params(value):
    return {"w": jnp.int32(value)}


def nothing(name):
    raise AssertionError(f"{name} was asked for")


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_versions(collector, staleness):
    """Collection k has the parameters of `staleness` steps before, as they were, although the learner gave them away;
    validation has the newest."""
    work = Work(staleness=staleness)
    seen = []
    with Generation(work, "grpo") as generation_:
        newest = params(100)
        generation_.resume(nothing, nothing, 0, {}, newest)
        for step in range(6):
            for k in range(staleness + 1):
                generation_.ask(step + k)
            collected = generation_.take(step)
            seen.append((collected.version, int(collected.trajectories[0].ids[0])))
            if staleness:
                newest["w"].delete()  # what donation does
            newest = params(101 + step)
            generation_.publish(newest, step + 1)
            if step == 2:
                generation_.validate(3)
    expected = [max(0, k - staleness) for k in range(6)]
    assert seen == [(v, 100 + v) for v in expected]
    assert ("validation", 3, 103, 3) in collector.calls
    assert [c[1] for c in collector.calls if c[0] == "train"] == list(range(6))
    assert work.engine.freed == (0 if staleness else 6)  # nothing is sampled while these learn


def test_sampling_goes_on_while_a_step_is_learned(collector):
    """With staleness 1 the next collection begins before the parameters it does not wait for are there."""
    work = Work(staleness=1)
    with Generation(work, "grpo") as ahead:
        ahead.resume(nothing, nothing, 0, {}, params(0))
        ahead.ask(0)
        ahead.ask(1)
        ahead.take(0)
        assert ahead.take(1).version == 0  # nothing was published in between


def test_in_flight_collections_take_up_new_parameters(collector):
    work = Work(staleness=1, weight_sync="in_flight")
    with Generation(work, "grpo") as ahead:
        collector.gate.clear()
        ahead.resume(nothing, nothing, 0, {}, params(0))  # asks for the first one
        while not collector.calls:
            pass
        ahead.publish(params(7), 1)
        collector.gate.set()
        collected = ahead.take(0)
        assert collected.version == 0 and collected.trajectories[0].versions == (0, 1)
        ahead.publish(params(8), 2)
        assert work.engine.version == 1  # nothing under way: the next collection takes it
        ahead.ask(1)
        assert ahead.take(1).trajectories[0].versions == (2, 2)


def test_a_checkpoint_keeps_what_is_pending(collector, tmp_path):
    """Finished collections as they are, the parameters of the one that was not; the resumed run has the same ones."""
    work = Work(staleness=2)
    with Generation(work, "grpo") as before:
        before.resume(nothing, nothing, 0, {}, params(50))
        for k in range(3):
            before.ask(k)
        for step in (0, 1):
            before.take(step)
            before.publish(params(51 + step), step + 1)
        before.ask(3)  # version 1
        while not before._futures[3].done():
            pass
        before.ask(4)
        before.take(2)
        before.publish(params(53), 3)
        collector.gate.clear()
        while not before._futures[4].done():  # version 2
            collector.gate.set()
        collector.gate.clear()
        before._futures.pop(4)
        before.ask(4)  # anew, and held back
        files, items, told = before.pending(tmp_path)
        whole = before._futures[3].result()
        work.interrupt.requested = True  # a Ctrl-C may have spoilt what ended just now
        assert before.pending(tmp_path)[0] == {} and set(before.pending(tmp_path)[1]) == {"version_1", "version_2"}
        work.stop = Interrupted(130)
        with pytest.raises(Interrupted):
            before.take(4)
    assert (
        set(files) == {"pending-000003.parquet"} and set(items) == {"version_2"} and int(items["version_2"]["w"]) == 52
    )
    work.stop, work.interrupt.requested = None, False
    collector.gate.set()
    with Generation(work, "grpo") as after:
        after.resume(files.__getitem__, items.__getitem__, 3, told, params(53))
        for k in (3, 4, 5):
            after.ask(k)
        again = after.take(3)
        assert again.version == whole.version == 1 and again.figures == whole.figures
        for a, b in zip(again.trajectories, whole.trajectories, strict=True):
            assert np.array_equal(a.logprobs, b.logprobs) and np.array_equal(a.ids, b.ids) and a.versions == b.versions
        assert int(after.take(4).trajectories[0].ids[0]) == 52
        assert int(after.take(5).trajectories[0].ids[0]) == 53


def test_leaving_ends_what_is_under_way(collector):
    collector.gate.clear()
    with Generation(Work(staleness=1), "grpo") as ahead:
        ahead.resume(nothing, nothing, 0, {}, params(0))
        ahead.ask(0)
        while not collector.calls:
            pass
    with pytest.raises(generation._Closed):
        ahead.take(0)


def test_dynamic_sampling_is_bounded_and_repeatable(collector):
    """Groups without spread are made up for by other prompts, a bounded number of times."""
    work = Work(prompts=4, objective="dapo", constant_groups="resample", resample_limit=2)
    first = prompts(work.config, 0, 40, [])
    collector.rewards |= dict.fromkeys(first[:2], (1.0, 1.0))
    more = further_prompts(work.config, 0, 40, first, 2)
    collector.rewards[more[0]] = (0.0, 0.0)

    def collected():
        with Generation(work, "grpo") as now:
            now.resume(nothing, nothing, 0, {}, params(0))
            now.ask(0)
            return now.take(0)

    found = collected()
    tasks = [t.task_index for t in found.trajectories[::2]]
    assert tasks[:6] == first + more and len(tasks) == 7 and len(set(tasks)) == 7
    assert [t.group for t in found.trajectories[::2]] == list(range(7))
    assert found.figures["resample_collections"] == 2
    assert [t.task_index for t in collected().trajectories] == [t.task_index for t in found.trajectories]
    collector.rewards |= dict.fromkeys(range(40), (1.0, 1.0))  # nothing anywhere to learn from
    assert collected().figures["resample_collections"] == 2


def test_further_prompts_are_others():
    config = Work().config
    used = list(range(37))
    assert sorted(further_prompts(config, 3, 40, used, 5)) == [37, 38, 39]
    assert further_prompts(config, 3, 40, [1, 2], 5) == further_prompts(config, 3, 40, [1, 2], 6)[:5]
    assert further_prompts(config, 3, 40, [1, 2], 5) != further_prompts(config, 4, 40, [1, 2], 5)
