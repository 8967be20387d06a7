"""Rejected proposals never become tables."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from trace_jax.config import DataConfig, RunConfig, SimulatorConfig
from trace_jax.simulator.accepted import accepted_episodes, balanced_composition
from trace_jax.simulator.causes import CAUSE_NAMES, SEGMENT_CAUSES
from trace_jax.warehouse import dataset, materialize, splits


def test_only_accepted_episodes_are_materialised(tmp_path, monkeypatch):
    """Simulating and verifying makes no table; a data set holds the accepted campaigns and no other."""

    def early(*args):
        pytest.fail("a table was made before the episodes were accepted")

    with monkeypatch.context() as patch:
        patch.setattr(materialize, "visible_chunk", early)
        patch.setattr(materialize, "hidden_chunk", early)
        config = RunConfig(simulator=SimulatorConfig(batch=64), data=DataConfig(test=12))
        episodes = splits.load_split(config, "test")
    assert len(episodes) == 12 and episodes.verdict.accept.all()
    strata = np.stack([episodes.batch.cause, (episodes.batch.slice_attributes >= 0).sum(1)], 1)
    first = np.array([(strata[: i + 1] == s).all(1).sum() for i, s in enumerate(strata)])
    assert episodes.batch.index.sum() > (first - 1).sum()  # indices were skipped: some proposals were rejected
    dataset.write(tmp_path / "set", {"test": episodes})
    for table in ("visible/daily_campaign", "visible/segment_daily", "hidden/gt_episode"):
        (part,) = (tmp_path / "set/test" / table).glob("*.parquet")
        names = set(pq.read_table(part)["campaign_id"].to_pylist())
        own = {record.campaign_id for record in episodes}
        siblings = {materialize.campaign_name(c) for c in episodes.batch.sibling_id.reshape(-1)}
        assert names == (own | siblings if table == "visible/daily_campaign" else own)


def test_accepted_episodes_have_passed_every_check_that_is_listed():
    """All strata: what `gt_validation` says of an accepted episode agrees with its acceptance."""
    composition = balanced_composition(len(balanced_composition(10**6)))
    batch, verdict = accepted_episodes(SimulatorConfig(batch=64), 5, "checks", composition)
    assert set(batch.cause.tolist()) == set(range(len(CAUSE_NAMES)))
    rows = materialize.hidden_chunk(batch, verdict, np.arange(len(batch.cause)))["gt_validation"].to_pylist()
    assert [row for row in rows if not row["passed"]] == []
    segment = {materialize.campaign_name(i) for i, c in zip(batch.campaign_id, batch.cause, strict=True)
               if CAUSE_NAMES[c] in SEGMENT_CAUSES}  # fmt: skip
    assert {row["campaign_id"] for row in rows if row["check_name"].startswith("rival_slice")} == segment
    assert len({row["campaign_id"] for row in rows}) == len(batch.cause) > len(segment)
