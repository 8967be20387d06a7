"""Metrics of the search environment: values, intervals, files, table and page, beside those of advertising."""

import json

import numpy as np
import pytest

from trace_jax import cli_parser
from trace_jax.config import ConfigError, EvaluationConfig, RunConfig
from trace_jax.config_io import dump
from trace_jax.environments.search.answer import grade
from trace_jax.evaluation import bootstrap, search_metrics, store, table
from trace_jax.evaluation.evaluate import records_of
from trace_jax.evaluation.kinds import KINDS, kind_of
from trace_jax.recipes import domain
from trace_jax.report import html
from trace_jax.rollout.trajectory import Trajectory

KIND = KINDS["search"]
CONFIG = EvaluationConfig(bootstrap=200)


def records(share, samples=5, questions=40):
    """Questions of 2 and 3 hops by turns; the first `share` of the samples of every even question are right."""
    return [
        search_metrics.SearchRecord(i, 2 + i % 2, s, s > 0, i % 2 == 0 and s < share * samples, 4, "finished")
        for i in range(questions)
        for s in range(samples)
    ]


def test_values_are_means_over_questions():
    result = search_metrics.summarise(records(0.6), CONFIG)
    assert result["environment"] == "search" and result["by_hops"].keys() == {"2", "3"}
    assert result["right_at_1"]["value"] == pytest.approx(0.3) and result["right_at_5"]["value"] == pytest.approx(0.5)
    assert result["by_hops"]["2"] == {
        "value": pytest.approx(0.6),
        "low": pytest.approx(0.6),
        "high": pytest.approx(0.6),
    }
    assert result["by_hops"]["3"]["value"] == 0.0
    assert result["parsed"]["value"] == pytest.approx(0.8) and result["tool_calls"]["value"] == 4
    assert result["right_at_1"]["low"] < 0.3 < result["right_at_1"]["high"]
    assert result["extra"]["episodes"] == 40 and result["extra"]["status"] == {"finished": 200}
    assert search_metrics.summarise(records(1, samples=1), CONFIG)["right_at_5"] == dict(bootstrap.NULLS)
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        search_metrics.summarise([], CONFIG)


def test_difference_is_paired():
    change = search_metrics.paired_difference(records(0.2), records(0.6), CONFIG)
    assert change["value"] == pytest.approx(0.2) and change["low"] > 0
    assert search_metrics.paired_difference(records(0.2), [], CONFIG) == dict(bootstrap.NULLS)


def test_records_of_trajectories():
    reward = grade("Bala", "bala", 3, 0.05)
    streams = {"ids": np.zeros(1, np.int32), "loss_mask": np.ones(1, bool), "logprobs": np.zeros(1, np.float32)}
    streams |= {"turn_index": np.zeros(1, np.int32), "labels": {"hops": 3, "type": "3_hops"}, "task_index": 4}
    done = Trajectory(**streams, versions=(0,), status="finished", info=dict(reward.info), tool_calls=2)
    lost = Trajectory(**streams, versions=(0,), status="truncated")
    found = records_of([done, lost], search_metrics.record_of)
    assert found[0] == search_metrics.SearchRecord(4, 3, 0, True, True, 2, "finished")
    assert found[1] == search_metrics.SearchRecord(4, 3, 0, False, False, 0, "truncated")


def test_files_table_and_page(tmp_path):
    (tmp_path / "config.yaml").write_text(dump(RunConfig()))
    for agent, share in (("untrained", 0), ("explorer", 0.2), ("solver", 1), ("sft", 0.2), ("grpo", 0.8)):
        store.save(tmp_path, agent, search_metrics.summarise(records(share), CONFIG), records(share))
    assert store.load_records(tmp_path, "grpo", KIND) == records(0.8)
    results = store.load_summaries(tmp_path)
    assert kind_of(results) is KIND and kind_of({}) is KINDS["ads"]
    built = table.build(results)
    assert built.columns == ("untrained", "explorer", "solver", "SFT", "SFT->GRPO") and "Right@1" in built.title
    assert [label for label, _ in built.rows] == ["Right@1", "Right@5", "2 hops", "3 hops", "parsed", "tool calls"]
    assert "0.400 [" in dict(built.rows)["Right@1"][-1]
    page = html.build(tmp_path)
    assert (
        "SFT-&gt;GRPO minus explorer, Right@1" in page
        and "advert" not in page
        and "cause" not in page.split("<details>")[0]
    )
    with pytest.raises(ConfigError, match="environment ads, search"):
        table.build(results | {"other": {}})


def test_damaged_files_are_refused(tmp_path):
    summary = search_metrics.summarise(records(0.5), CONFIG)
    for change in ({"by_hops": {"two": summary["parsed"]}}, {"environment": "chess"}, {"right_at_1": {"value": "x"}}):
        store.save(tmp_path, "sft", summary | change, [])
        with pytest.raises(ConfigError, match="holds no results"):
            store.load_summaries(tmp_path)
    good = json.dumps(vars(records(0.5)[0]))
    for line in (good.replace('"hops": 2', '"hops": 0'), good.replace("4", '"4"'), "{}", "[]"):
        (tmp_path / "evaluation" / "sft.jsonl").write_text(line + "\n")
        with pytest.raises(ConfigError, match="cannot read"):
            store.load_records(tmp_path, "sft", KIND)


def test_every_table_knows_the_same_environments_and_agents():
    assert domain.DOMAINS.keys() == KINDS.keys()
    assert all(
        tuple(row.agents) == KINDS[name].agents and row.kind is KINDS[name] for name, row in domain.DOMAINS.items()
    )
    assert all((*row.rivals, *row.bounds) == KINDS[name].rivals for name, row in domain.DOMAINS.items())
    assert domain.SCRIPTED == cli_parser.SCRIPTED
