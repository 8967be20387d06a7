"""The benchmark's hash: the same for the same episodes, another for any change that an agent or a grader would see."""

import dataclasses

import numpy as np
from helpers_episodes import fake_batch, fake_set

from trace_jax.config import EnvironmentConfig
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.environments.base import Task
from trace_jax.evaluation.identity import benchmark_of
from trace_jax.warehouse import dataset, identity
from trace_jax.warehouse.splits import EpisodeSet


def test_the_hash_is_of_content(tmp_path):
    """Made again, written and read back, worded otherwise: the same."""
    first, again = fake_set(4), fake_set(4)
    known = identity.sha256(first)
    assert identity.sha256(again) == known and len(known) == 64
    dataset.write(tmp_path / "set", {"test": first})
    assert identity.sha256(dataset.read(tmp_path / "set")["test"]) == known
    for prompt in ("compact", "full"):
        environment = AdsEnvironment(first, EnvironmentConfig(prompt=prompt))
        assert benchmark_of(environment) == {"episodes": 4, "sha256": known}


def test_any_visible_change_changes_it():
    batch, verdict = fake_batch(4)
    known = identity.sha256(EpisodeSet(batch, verdict, "test"))
    clicks, stock, spend, cause = (np.array(getattr(batch, n)) for n in ("clicks", "in_stock", "spend", "cause"))
    clicks[2, 3, 1] += 1
    stock[1, 2] += 0.001
    spend[0, 5, 2] += 0.01
    cause[3] = cause[2]
    changes = {"clicks": clicks, "in_stock": stock, "spend": spend, "cause": cause}
    hashes = {identity.sha256(EpisodeSet(batch.replace(**{n: x}), verdict, "test")) for n, x in changes.items()}
    assert len(hashes) == 4 and known not in hashes
    rows = EpisodeSet(batch, verdict, "test")
    assert identity.sha256(rows.take([1, 0, 2, 3])) != known and identity.sha256(rows.take([0, 1, 2])) != known


def test_what_nobody_sees_has_no_part():
    """Margins of the oracle, and float noise below a cent and a ten-thousandth."""
    batch, verdict = fake_batch(3)
    known = identity.sha256(EpisodeSet(batch, verdict, "test"))
    other = dataclasses.replace(verdict, detectability=np.asarray(verdict.detectability) + 1)
    assert identity.sha256(EpisodeSet(batch, other, "test")) == known
    nudged = batch.replace(in_stock=np.round(np.asarray(batch.in_stock), 4) + np.float32(1e-6))
    rounded = batch.replace(in_stock=np.round(np.asarray(batch.in_stock), 4))
    assert identity.sha256(EpisodeSet(nudged, verdict, "test")) == identity.sha256(EpisodeSet(rounded, verdict, "test"))


def test_other_environments_are_known_by_their_tasks():
    class Questions:
        def __init__(self, answers):
            self._answers = answers

        def __len__(self):
            return len(self._answers)

        def task(self, index):
            return Task(index, "", f"question {index}", self._answers[index])

    one, same, other = (benchmark_of(Questions(x)) for x in (["a", "b"], ["a", "b"], ["a", "c"]))
    assert one == same and one["episodes"] == 2 and one["sha256"] != other["sha256"]
