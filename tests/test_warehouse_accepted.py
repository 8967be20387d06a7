"""Rejected proposals never become tables."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from trace_jax.config import DataConfig, RunConfig, SimulatorConfig
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
