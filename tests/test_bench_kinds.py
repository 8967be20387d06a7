"""Benchmarks: the arithmetic behind the shares, and every kind at a tiny size."""

import dataclasses
import functools
import json
import time

import jax
import pytest
from flax import nnx

from trace_jax import bench
from trace_jax.bench import learner, measure, rollout_compare, rollout_peer, rollout_tools, sim, sim_programs
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
    simulator=SimulatorConfig(segments=24, batch=32),
    tokenizer=TokenizerConfig(vocab_size=300),
    policy=PolicyConfig(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16, max_length=128),
    rollout=RolloutConfig(context=128, max_turn_tokens=8, max_turns=2, slots=8),
    grpo=GRPOConfig(group=2, microbatch=BatchConfig(row_length=64, rows=2)),
)


# What "sim" adds to the sections that every kind has.
HEADLINE = ("raw_episodes_per_s", "verified_episodes_per_s", "floor_ratio", "numpy_speedup", "verified_share")
ADDED = {
    "sim": {*HEADLINE, "acceptance", "table", "weak_scaling"},
    "rollout": {"vs_transformers", "vs_bare_loop", "reuse_speedup", "tool_overlap", "occupancy", "compiles"}
    | {"details", "table", "note"},
}


@functools.cache
def tiny(kind):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BATCHES", (64, 128)), ("STREAM", (1, 3)), ("NUMPY_EPISODES", 16)):
            patch.setattr(sim, name, value)
        # The comparisons have shapes of their own; test_bench_rollout.py looks at them.
        shape = Shape(prompt=12, turn=4, turns=2, observation=5)
        for module, name, value in (
            (rollout_compare, "SIZES", dict.fromkeys(("nano", "5m"), (TINY.policy, 50))),
            (rollout_compare, "ROWS", 4),
            (rollout_compare, "SHAPE", Shape(prompt=12, turn=6)),
            (rollout_compare, "REUSE_SHAPE", shape),
            (rollout_tools, "SHAPE", shape),
            (rollout_peer, "PACKAGES", ("no_such_package",)),
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
    assert measured["arrow_speedup"] == pytest.approx(ratio) and ratio > 3
    # Three tables of four campaigns, and some segments; an export may lack a few days.
    assert sizes["rows_of_56_days"] > 50 * (3 * 4 + 2)


def test_sim_states_its_rates_by_batch():
    """The headline is that of one batch of the table, and the parts of it agree."""
    result = tiny("sim")
    assert [row["batch"] for row in result["table"]] == [64, 128]
    (best,) = (row for row in result["table"] if row["batch"] == result["sizes"]["batch"])
    assert best["verified_episodes_per_s"] == max(row["verified_episodes_per_s"] for row in result["table"])
    assert result["raw_episodes_per_s"] == pytest.approx(best["batch"] / best["seconds"]["raw"]["median"])
    assert result["floor_ratio"] == pytest.approx(
        best["seconds"]["verified"]["median"] / best["seconds"]["floor"]["median"]
    )
    measured, sizes = result["measured"], result["sizes"]
    assert result["verified_episodes_per_s"] == measured["accepted_per_second"]
    assert measured["accepted_per_second"] == pytest.approx(measured["acceptance"] * measured["proposals_per_second"])
    assert result["verified_share"] == pytest.approx(result["share"]["verified_of_raw"])
    assert measured["bytes_per_second"] == pytest.approx(result["raw_episodes_per_s"] * sizes["bytes_per_episode"])
    assert sizes["bytes_per_episode"] > 5 * 4 * sizes["days"] * sizes["segments"]
    assert result["numpy_speedup"] > 0 and len(result["acceptance"]) == 16
    assert result["weak_scaling"] is None  # one device
    assert "batch 128, raw_episodes_per_s" in bench.text(result)


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
