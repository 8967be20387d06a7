"""Benchmarks: the arithmetic behind the shares, and every kind at a tiny size."""

import dataclasses
import functools
import json
import time

import jax
import pytest
from flax import nnx
from helpers_episodes import fake_set

from trace_jax import bench
from trace_jax.bench import (
    learner,
    learner_compare,
    learner_memory,
    measure,
    probe,
    rollout_compare,
    rollout_peer,
    rollout_tools,
    sim,
    sim_programs,
    tools,
)
from trace_jax.bench.rollout_drive import Shape
from trace_jax.config import (
    BatchConfig,
    ConfigError,
    GRPOConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SimulatorConfig,
    TokenizerConfig,
)
from trace_jax.learner import packing
from trace_jax.policy.transformer import Transformer
from trace_jax.simulator import stream
from trace_jax.simulator.params import SimulatorParams

pytestmark = pytest.mark.xdist_group("bench")  # each kind runs once

TINY = RunConfig(
    simulator=SimulatorConfig(segments=24, batch=64),  # as in the smoke run, whose program it is
    tokenizer=TokenizerConfig(vocab_size=300),
    policy=PolicyConfig(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16, max_length=128),
    rollout=RolloutConfig(context=128, max_turn_tokens=8, max_turns=2, slots=8),
    grpo=GRPOConfig(group=2, microbatch=BatchConfig(row_length=64, rows=2)),
)
# Of the learner, without torch.
COMPARED = dict.fromkeys(("vs_torch", "vs_torch_selective", "vs_torch_padded", "vs_torch_packed"))
COMPARED |= dict.fromkeys(("matmul_share", "packing_gain", "bucket_gain"), {"median": 0.5})
COMPARED |= {"tokens_per_second": {"full": 10.0}, "cores_taken_by_others": None}

# What "sim" adds to the sections that every kind has.
HEADLINE = ("raw_episodes_per_s", "verified_episodes_per_s", "floor_ratio", "numpy_speedup", "verified_share")
ADDED = {
    "sim": {*HEADLINE, "acceptance", "table", "weak_scaling"},
    "rollout": {"vs_transformers", "vs_bare_loop", "reuse_speedup", "tool_overlap", "occupancy", "compiles"}
    | {"details", "table", "note"},
    "learner": {f"vs_torch{form}" for form in ("", "_selective", "_padded", "_packed")}
    | {"tokens_per_s", "matmul_share", "packing_gain", "bucket_gain", "peak_memory_ratio", "details", "table", "note"},
    "probe": {"packed_speedup", "token_bound", "of_bound", "peak_bytes", "step_share", "note"},
}


@functools.cache
def tiny(kind):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BATCHES", (64,)), ("STREAM", (1, 3)), ("NUMPY_EPISODES", 16)):
            patch.setattr(sim, name, value)
        accepted = tools._episodes
        patch.setattr(tools, "EPISODES", 8)
        # The long episodes are made by hand: simulating them would compile one more program.
        long = fake_set(2, days=tools.LONG["days"], segments=24, siblings=tools.LONG["siblings"])
        patch.setattr(tools, "LONG_EPISODES", len(long))
        patch.setattr(tools, "_episodes", lambda c, n: long if c.simulator.days == 56 else accepted(c, n))
        # The comparisons have shapes of their own; test_bench_rollout.py and test_bench_learner.py look at them.
        shape = Shape(prompt=12, turn=4, turns=2, observation=5)
        for module, name, value in (
            (rollout_compare, "SIZES", dict.fromkeys(("nano", "5m"), (TINY.policy, 50))),
            (rollout_compare, "ROWS", 4),
            (rollout_compare, "SHAPE", Shape(prompt=12, turn=6)),
            (rollout_compare, "REUSE_SHAPE", shape),
            (rollout_tools, "SHAPE", shape),
            (rollout_peer, "PACKAGES", ("no_such_package",)),
            (probe, "SHAPE", probe.Shape(2, turns=2, turn=10, prompt=5, answer=4, row_length=64, plain_buckets=())),
            (learner_compare, "compare", lambda *_: COMPARED),
            (learner_memory, "peak_bytes", lambda *_: {"chunked": 1, "full": 4}),
        ):
            patch.setattr(module, name, value)
        return bench.run(kind, TINY, repeats=1)


@pytest.mark.parametrize("kind", bench.KINDS)
def test_every_kind_reports_floor_measured_and_share(kind):
    result = tiny(kind)
    json.dumps(result, allow_nan=False)
    assert result["kind"] == kind and result["machine"]["versions"]["jax"]
    sections = {"kind", "repeats", "machine", "sizes", "floor", "measured", "share"}
    # A busy machine adds its warning.
    assert set(result) - {"warning"} == sections | ADDED.get(kind, set())
    shown = bench.text(result)
    assert kind in shown and " %" in shown and "seconds" in shown
    rates = [v for v in result["measured"].values() if isinstance(v, float)]
    assert rates and all(v > 0 for k, v in result["measured"].items() if k.endswith("per_second"))
    assert all(0 < v < 10 for v in result["share"].values()), result["share"]


def test_rollout_without_a_peer_is_null_and_says_how_to_get_it():
    result = tiny("rollout")
    assert result["vs_transformers"] is None and result["vs_bare_loop"]["nano"] > 0
    assert all(result["details"][name]["vs_transformers"] is None for name in ("nano", "5m"))
    assert "--peers PYTHON" in result["note"] and "--peers PYTHON" in bench.text(result)


def test_tools_state_loading_against_a_row_wise_insert():
    """The rates are those of the reported seconds, and loading from Arrow pays."""
    result = tiny("tools")
    measured, sizes = result["measured"], result["sizes"]
    seconds = {name: times["median"] for name, times in measured["seconds"].items()}
    assert measured["arrow_episodes_per_s"] == pytest.approx(sizes["episodes"] / seconds["arrow"])
    assert measured["queries_per_s"] == pytest.approx(
        sizes["episodes"] * sizes["calls_per_episode"] / seconds["queries"]
    )
    assert measured["open_56_days_ms"] == pytest.approx(1e3 * seconds["open_56_days"])
    assert measured["overview_56_days_ms"] > measured["open_56_days_ms"]  # the same, and one query more
    ratio = measured["arrow_episodes_per_s"] / measured["rowwise_episodes_per_s"]
    assert measured["arrow_speedup"] == pytest.approx(ratio) and ratio > 1
    # Three tables of four campaigns, and some segments; an export may lack a few days.
    assert sizes["rows_of_56_days"] > 50 * (3 * 4 + 2)


def test_sim_says_what_it_measured():
    result = tiny("sim")
    (row,) = result["table"]
    assert row["batch"] == result["sizes"]["batch"] == 64
    assert set(row["seconds"]) == {"raw", "verified", *sim.FLOORS, "numpy", "numpy_literal"}
    assert result["raw_episodes_per_s"] == pytest.approx(64 / row["seconds"]["raw"]["median"])
    measured, sizes = result["measured"], result["sizes"]
    assert result["verified_episodes_per_s"] == measured["accepted_per_second"]
    assert measured["accepted_per_second"] == pytest.approx(measured["acceptance"] * measured["proposals_per_second"])
    assert result["verified_share"] == pytest.approx(result["share"]["verified_of_raw"])
    assert measured["bytes_per_second"] == pytest.approx(result["raw_episodes_per_s"] * sizes["bytes_per_episode"])
    assert sizes["bytes_per_episode"] > 5 * 4 * sizes["days"] * sizes["segments"]
    assert result["numpy_speedup"] > 0 and len(result["acceptance"]) == 16
    assert result["weak_scaling"] is None  # one device


class Clock(sim._Bench):
    """Takes no time: a batch of 64 has 1 s of overhead, one of 256 has 8 s of swapping."""

    def round(self, batch, reference):
        self.counts += [[batch], [batch // 4]]
        raw = batch / 64 + {64: 1, 128: 1, 256: 8}[batch]
        return {"raw": raw, "verified": 2 * raw, "floor": raw / 2, "blocked_floor": raw / 4, "own_floor": raw / 5}

    def memory_growth_mb(self, batch):
        return 0.0


def test_the_headline_of_sim_is_that_of_the_best_batch(monkeypatch):
    """Seconds made up: 2, 3 and 12 for 64, 128 and 256 episodes, twice that with the oracle, of which it accepts a
    quarter."""
    for name, value in (("BATCHES", (64, 128, 256)), ("_Bench", Clock), ("_reference", lambda _: None)):
        monkeypatch.setattr(sim, name, value)
    result = sim.run(TINY, repeats=2)
    assert [row["batch"] for row in result["table"]] == [64, 128, 256] and result["sizes"]["batch"] == 128
    assert [row["raw_episodes_per_s"] for row in result["table"]] == pytest.approx([32, 128 / 3, 64 / 3])
    assert result["raw_episodes_per_s"] == pytest.approx(128 / 3)
    assert result["measured"]["proposals_per_second"] == pytest.approx(128 / 6)
    assert result["verified_episodes_per_s"] == pytest.approx(128 / 6 / 4)
    assert result["measured"]["acceptance"] == result["measured"]["acceptance_balanced"] == pytest.approx(0.25)
    assert result["verified_share"] == pytest.approx(0.125) and result["floor_ratio"] == pytest.approx(4)
    assert result["share"]["of_own_floor"] == pytest.approx(1 / 10)
    assert result["numpy_speedup"] is None and "not installed" in result["note"]
    shown = bench.text(tiny("sim") | result)
    assert "batch 256, raw_episodes_per_s" in shown


def test_acceptance_of_a_composition_is_what_must_be_proposed_for_it():
    rates = {("A", 0): 0.5, ("B", 1): 0.25}
    assert sim._acceptance(rates, {("A", 0): 10, ("B", 1): 10}) == pytest.approx(20 / 60)
    assert sim._acceptance(rates, {("A", 0): 30, ("B", 1): 10}) == pytest.approx(40 / 100)


def test_without_a_checkout_there_is_no_reference(monkeypatch, tmp_path):
    monkeypatch.setattr(sim, "REFERENCE", tmp_path / "simulator_numpy.py")
    assert sim._reference(TINY.simulator) is None
    row = sim._row(64, [{name: 1.0 for name in ("raw", "verified", *sim.FLOORS)}])
    assert "numpy_speedup" not in row and row["floor_ratio"] == 1.0 and row["raw_episodes_per_s"] == 64


def test_the_floor_writes_what_the_simulator_writes():
    """Every array of an episode, from as many random numbers as the episode takes."""
    want = sim_programs.episode_shapes(TINY.simulator)
    for own_generator in (False, True):
        one = sim_programs.floor(TINY.simulator, own_generator)
        got = jax.eval_shape(one, stream.stream_key(0, "t"), SimulatorParams(), *[jax.numpy.int32(0)] * 3)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(lambda x: (x.shape, x.dtype), want)


def test_unknown_kind_and_no_repeats_are_one_clear_line():
    with pytest.raises(ConfigError, match="sim, tools, rollout, learner"):
        bench.run("probes", TINY)
    with pytest.raises(ConfigError, match="between 1 and 1000"):
        bench.run("sim", TINY, repeats=0)
    short = dataclasses.replace(TINY, rollout=dataclasses.replace(TINY.rollout, context=45))
    with pytest.raises(ConfigError, match="rollout.context 45"):
        bench.run("rollout", short, repeats=1)


@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_six_per_matmul_weight_and_the_attended_tokens(tied):
    """Against the parameter count of the model itself: 6 N D, plus 12 per head channel and attended token."""
    policy = PolicyConfig(layers=3, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=48, tie_embeddings=tied)
    params = nnx.state(Transformer(policy, 100, rngs=nnx.Rngs(0)), nnx.Param)
    matrices = sum(p.size for p in jax.tree.leaves(params) if p.ndim == 3)  # [layers, in, out]
    weights = matrices + 100 * 32  # and the output projection, whether tied or not
    flops = learner.flops_per_token(policy, 100, attended=10.0)
    assert flops == pytest.approx(6 * weights + 12 * 3 * 4 * 8 * 10.0)


def test_sequences_fill_the_rows_they_are_meant_for():
    sequences = learner._sequences(64, 8, 50)
    (batch,) = packing.pack(sequences, 64, 8)
    assert 0.8 * 8 * 64 < sum(map(len, sequences)) == (batch.segments > 0).sum()
    assert all(len(s) <= 32 and s.ids.max() < 50 and not s.loss_mask[0] for s in sequences)


def test_timing_counts_the_calls_it_should():
    calls = []
    times = measure.seconds(lambda: calls.append(time.sleep(0.002)), repeats=3, warmup=2)
    assert len(calls) == 5 and len(times) == 3 and min(times) >= 0.002
    assert measure.timed(lambda: time.sleep(0.002)) >= 0.002
    assert measure.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "fastest": 1.0, "slowest": 3.0}
