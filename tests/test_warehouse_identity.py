"""The benchmark's hash: the same for the same episodes, another for any change that an agent or a grader would see."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
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
        assert benchmark_of(environment) == {"episodes": 4, **identity.described(first)}


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


def test_another_processor_s_rounding_is_the_same_set():
    """A count one higher here and there is; other draws, other answers and another order are not."""
    batch, verdict = fake_batch(4)
    batch = batch.replace(impressions=np.asarray(batch.impressions) * 20)
    known = identity.described(EpisodeSet(batch, verdict, "test"))
    shown = np.asarray(batch.impressions)
    nudged = np.array(shown)
    day, segment = np.unravel_index(np.argmax(shown[2]), shown[2].shape)
    nudged[2, day, segment] += 1
    other = identity.described(EpisodeSet(batch.replace(impressions=nudged), verdict, "test"))
    assert other["sha256"] != known["sha256"] and identity.same(known, other) and identity.same(other, known)
    drawn = np.random.default_rng(1).poisson(shown).astype(shown.dtype)
    cause = np.array(batch.cause)
    cause[3] = cause[2]
    for change in ({"impressions": drawn}, {"cause": cause}):
        assert not identity.same(known, identity.described(EpisodeSet(batch.replace(**change), verdict, "test")))
    turned = EpisodeSet(batch, verdict, "test").take([1, 0, 2, 3])
    assert not identity.same(known, identity.described(turned))
    older = {"sha256": known["sha256"]}
    assert identity.same(known, older) and not identity.same(older, {"sha256": other["sha256"]})
    assert not identity.same(older, other)


def test_totals_are_sums_of_what_agents_see():
    episodes = fake_set(3)
    totals = identity.described(episodes)["totals"]
    rows = [r for record in episodes for r in record.visible()["segment_daily"].to_pylist()]
    for column in ("impressions", "clicks", "spend"):
        wanted = sum(r[column] for r in rows)
        assert wanted > 0 and abs(totals[f"segment_daily.{column}"] - wanted) <= 1e-6 * wanted


@pytest.mark.slow
def test_the_benchmark_is_the_same_set_with_other_vector_instructions(tmp_path):
    """XLA told to do without AVX rounds otherwise; about a minute."""
    made = []
    for name, flags in (("default", ""), ("sse", "--xla_cpu_max_isa=SSE4_2")):
        words = ["simulate", "--split", "test", "--data.test", "60", "--out", str(tmp_path / name), "--json"]
        env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-m", "trace_jax.cli", *words], env=env, capture_output=True, check=True)
        made.append(json.loads(done.stdout.splitlines()[-1])["benchmark"])
    assert identity.same(*made)
    assert made[0]["totals"] != made[1]["totals"]  # else nothing was tested


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
