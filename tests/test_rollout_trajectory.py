"""Trajectories: consistency and the Parquet round trip."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trace_jax.config import ConfigError
from trace_jax.rollout.trajectory import Trajectory, from_table, read_parquet, to_table, write_parquet

SCALARS = ("versions", "status", "task_index", "group", "sample", "reward", "rewards", "tool_calls", "answer")


def _trajectory(**changes) -> Trajectory:
    base = Trajectory(
        ids=np.array([3, 1, 4, 1, 5], np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0], bool),
        logprobs=np.array([0, 0, -0.5, -1.25, 0], np.float32),
        turn_index=np.array([-1, -1, 0, 0, 0], np.int32),
        versions=(7,),
        status="finished",
        task_index=11,
        group=2,
        sample=5,
        reward=0.95,
        rewards={"attr": 1.0, "full": 0.0},
        tool_calls=1,
        answer='{"x": "é\n"}',
        info={"slice_jaccard": np.float32(0.5), "parsed": True},
        labels={"cause": "NO_SIGNAL", "driver": (("geo", "US"),)},
    )
    return dataclasses.replace(base, **changes)


def test_parquet_round_trip(tmp_path):
    originals = [_trajectory(), _trajectory(status="malformed", answer=None, versions=(), info={}, labels={})]
    path = tmp_path / "runs" / "step-3.parquet"
    write_parquet(path, originals, step=3)
    assert to_table(originals, 3).column("step").to_pylist() == [3, 3]
    for original, restored in zip(originals, read_parquet(path), strict=True):
        for name in ("ids", "loss_mask", "logprobs", "turn_index"):
            before, after = getattr(original, name), getattr(restored, name)
            assert before.dtype == after.dtype and (before == after).all()
        for name in SCALARS:
            assert getattr(original, name) == getattr(restored, name)
    assert restored.info == {} and list(tmp_path.rglob("*.partial")) == []
    first = read_parquet(path)[0]
    assert first.info == {"slice_jaccard": 0.5, "parsed": True}
    assert first.labels == {"cause": "NO_SIGNAL", "driver": [["geo", "US"]]}  # JSON has no tuples


def test_kept_sets_round_trip_and_files_without_them_are_read(tmp_path):
    kept = np.array([[-1, -1], [-1, -1], [4, 9], [1, -1], [-1, -1]], np.int32)
    write_parquet(path := tmp_path / "x.parquet", [_trajectory(kept=kept), _trajectory()])
    with_kept, without = read_parquet(path)
    assert with_kept.kept.dtype == np.int32 and np.array_equal(with_kept.kept, kept) and without.kept is None
    pq.write_table(to_table([_trajectory(kept=kept)]).drop_columns(["kept"]), path)  # of an earlier version
    (old,) = read_parquet(path)
    assert old.kept is None and np.array_equal(old.ids, _trajectory().ids)
    with pytest.raises(ValueError, match="differ in length"):
        _trajectory(kept=kept[:4])


def test_empty_collection_round_trips():
    assert from_table(to_table([])) == []


def test_streams_must_agree():
    with pytest.raises(ValueError, match="differ in length"):
        _trajectory(ids=np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="status"):
        _trajectory(status="done")


def test_unreadable_files_are_one_clear_line(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"not parquet")
    for name in ("x.parquet", "missing.parquet"):
        with pytest.raises(ConfigError) as caught:
            read_parquet(tmp_path / name)
        assert name in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot write"):
        write_parquet(tmp_path / "x.parquet" / "y.parquet", [])


def test_greedy_trajectories_give_no_behaviour_logprobs():
    """Case 4 of trainer: a greedy trajectory cannot reach the learner's ratio."""
    assert _trajectory().behaviour_logprobs()[2] == -0.5
    with pytest.raises(ConfigError, match="greedily"):
        _trajectory(logprobs=np.array([0, 0, np.nan, np.nan, 0], np.float32)).behaviour_logprobs()


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"x": [1, 2]}),
        to_table([_trajectory()]).drop_columns(["labels"]),
        to_table([_trajectory()]).set_column(9, "info", pa.array(["[1]"])),
        to_table([_trajectory()]).set_column(12, "ids", pa.array([None], pa.list_(pa.int32()))),
        to_table([_trajectory()]).set_column(4, "status", pa.array(["done"])),
        to_table([_trajectory()]).set_column(12, "ids", pa.array(["text"])),
    ],
    ids=["foreign", "column gone", "no object", "no ids", "no status", "other type"],
)
def test_foreign_parquet_files_are_one_clear_line(tmp_path, table):
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="^[^\\n]*x.parquet is no trajectory file[^\\n]*name one of trajectories/$"):
        read_parquet(tmp_path / "x.parquet")


def test_what_only_a_learner_needs_can_be_left_out(tmp_path):
    whole = _trajectory(kept=np.full((5, 2), 7, np.int32), experts=np.full((5, 3, 2), 1, np.int16))
    write_parquet(tmp_path / "a.parquet", [whole] * 70, step=4)  # more than one part
    light = read_parquet(tmp_path / "a.parquet", replay=False)
    assert len(light) == 70 and light[69].kept is None and light[69].experts is None
    assert all(np.array_equal(getattr(light[69], n), getattr(whole, n)) for n in ("ids", "loss_mask", "logprobs"))
    full = read_parquet(tmp_path / "a.parquet")[69]
    assert np.array_equal(full.kept, whole.kept) and np.array_equal(full.experts, whole.experts)
