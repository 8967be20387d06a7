"""Metrics against closed forms, brute force over subsets, and the coverage of the bootstrap."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import ConfigError, EvaluationConfig
from trace_jax.evaluation import metrics, store
from trace_jax.simulator.causes import CAUSE_NAMES, EPISODE_TYPES

CONFIG = EvaluationConfig(bootstrap=300)
NULLS = {"value": None, "low": None, "high": None}


def record(index, sample=0, *, type="campaign", cause="BID_INCREASE", right=True, full=None, **fields):
    full = right if full is None else full
    base = dict(parsed=True, jaccard=None, tool_calls=3, status="finished", predicted=cause if right else "BUDGET_CAP")
    return metrics.EvalRecord(
        index=index, type=type, cause=cause, sample=sample, cause_right=right, full_right=full, **(base | fields)
    )


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_at_k_is_the_binomial_formula(case):
    n, c, k = case
    expected = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert metrics.at_k(np.array([n]), np.array([c]), k)[0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 3), (6, 1, 2), (4, 4, 2), (5, 0, 5)])
def test_at_k_counts_subsets(n, c, k):
    right = [i < c for i in range(n)]
    subsets = list(itertools.combinations(right, k))
    share = sum(any(s) for s in subsets) / len(subsets)
    assert metrics.at_k(np.array([n]), np.array([c]), k)[0] == pytest.approx(share)


def test_at_k_survives_large_counts():
    assert metrics.at_k(np.array([5000]), np.array([10]), 400)[0] == pytest.approx(
        1 - float(math.comb(4990, 400) * 10**30 // math.comb(5000, 400)) / 1e30, abs=1e-9
    )


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError):
        metrics.at_k(np.array([n]), np.array([c]), k)


def test_hand_computed_summary():
    rows = []
    # Episode 0, 2-D slice: 5 answers, cause right in 4, slice exact in 2, parent slice (Jaccard 1/2) in 2.
    slice_2d = dict(type="segment_2d", cause="AD_QUALITY_DROP")
    rows += [record(0, s, **slice_2d, jaccard=1.0) for s in range(2)]
    rows += [record(0, s, **slice_2d, full=False, jaccard=0.5) for s in (2, 3)]
    rows += [record(0, 4, **slice_2d, right=False, jaccard=1.0, predicted="COMPETITIVE_PRESSURE")]
    # Episode 1, no signal: abstains in 3 of 5, does not parse once.
    rows += [record(1, s, type="no_signal", cause="NO_SIGNAL", right=s < 3, tool_calls=s) for s in range(4)]
    rows += [record(1, 4, type="no_signal", cause="NO_SIGNAL", right=False, parsed=False, predicted=None, tool_calls=4)]
    result = metrics.summarise(rows, CONFIG)
    value = {k: v["value"] for k, v in result.items() if "value" in v}
    assert value["cause_at_1"] == pytest.approx((4 / 5 + 3 / 5) / 2)
    assert value["full_attr_at_1"] == pytest.approx((2 / 5 + 3 / 5) / 2)
    assert value["full_attr_at_5"] == 1.0
    assert value["jaccard"] == pytest.approx((1 + 1 + 0.5 + 0.5) / 4)  # the wrong cause's slice does not count
    assert value["no_signal"] == pytest.approx(3 / 5)
    assert value["parsed"] == pytest.approx(9 / 10)
    assert value["tool_calls"] == pytest.approx((5 * 3 + 10) / 10)
    assert result["by_type"]["segment_2d"]["value"] == pytest.approx(2 / 5)
    assert result["by_cause"]["NO_SIGNAL"]["value"] == pytest.approx(3 / 5)
    counts = np.array(result["extra"]["confusion"]["counts"])
    assert counts.sum() == len(rows)
    row = dict(
        zip(result["extra"]["confusion"]["predicted"], counts[CAUSE_NAMES.index("AD_QUALITY_DROP")], strict=True)
    )
    assert row["AD_QUALITY_DROP"] == 4 and row["COMPETITIVE_PRESSURE"] == 1
    assert counts[CAUSE_NAMES.index("NO_SIGNAL"), -1] == 1


def test_keys_and_nulls_of_the_result_object():
    result = metrics.summarise([record(7)], CONFIG)
    assert list(result) == [
        "cause_at_1", "full_attr_at_1", "full_attr_at_5", "jaccard", "no_signal", "parsed", "tool_calls",
        "by_type", "by_cause", "extra",
    ]  # fmt: skip
    assert tuple(result["by_type"]) == EPISODE_TYPES and tuple(result["by_cause"]) == CAUSE_NAMES
    # One answer cannot give @5, and there is no segment or no-signal episode: null, never NaN.
    assert result["full_attr_at_5"] == result["jaccard"] == result["no_signal"] == NULLS
    assert result["by_type"]["mix"] == result["by_cause"]["BUDGET_CAP"] == NULLS
    json.dumps(result, allow_nan=False)


def test_right_cause_without_readable_slice_counts_as_jaccard_zero():
    rows = [
        record(i, type="segment_1d", cause="CREATIVE_FATIGUE", full=bool(i), jaccard=1.0 if i else None) for i in (0, 1)
    ]
    assert metrics.summarise(rows, CONFIG)["jaccard"]["value"] == pytest.approx(0.5)


def test_no_records_and_mixed_splits_are_refused():
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        metrics.summarise([], CONFIG)
    with pytest.raises(ConfigError, match="disagree"):
        metrics.summarise([record(1), record(1, 1, cause="BUDGET_CAP")], CONFIG)


answers = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(CAUSE_NAMES), st.booleans(), st.booleans()), min_size=1)


@settings(max_examples=40, deadline=None)
@given(answers, st.randoms(use_true_random=False))
def test_intervals_hold_the_value_and_order_does_not_matter(raw, shuffle):
    cause_of = {index: cause for index, cause, _, _ in raw}
    rows = [
        record(i, s, cause=cause_of[i], type="campaign", right=right, full=right and full, jaccard=0.5)
        for s, (i, _, right, full) in enumerate(raw)
    ]
    result = metrics.summarise(rows, EvaluationConfig(bootstrap=50), seed=1)
    cells = [v for v in result.values() if "value" in v] + [*result["by_type"].values(), *result["by_cause"].values()]
    for cell in cells:
        assert cell["value"] is None or cell["low"] <= cell["value"] <= cell["high"]
    assert result["full_attr_at_1"]["value"] <= result["cause_at_1"]["value"] + 1e-12
    shuffle.shuffle(rows)
    assert metrics.summarise(rows, EvaluationConfig(bootstrap=50), seed=1) == result


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_more_attempts_never_hurt(right):
    rows = [record(i, s, right=s < c) for i, c in enumerate(right) for s in range(5)]
    result = metrics.summarise(rows, EvaluationConfig(bootstrap=10))
    assert result["full_attr_at_5"]["value"] >= result["full_attr_at_1"]["value"] - 1e-12
    assert result["full_attr_at_5"]["value"] == pytest.approx(np.mean([c > 0 for c in right]))


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    """200 experiments of 80 episodes, 3 answers each, success rates that vary by episode: 95 % intervals."""
    rng, hits, truth = np.random.default_rng(0), 0, 0.6
    for trial in range(200):
        chance = rng.beta(1.2, 0.8, size=80)  # mean 0.6
        right = rng.random((80, 3)) < chance[:, None]
        rows = [record(i, s, right=bool(right[i, s])) for i in range(80) for s in range(3)]
        cell = metrics.summarise(rows, EvaluationConfig(bootstrap=400), seed=trial)["full_attr_at_1"]
        hits += cell["low"] <= truth <= cell["high"]
    assert 0.89 <= hits / 200 <= 0.985


def test_interval_ignores_extra_samples_of_the_same_episodes():
    """Episodes are the unit: copying every answer 20 times must not narrow the interval."""
    few = [record(i, s, right=i % 2 == 0) for i in range(20) for s in range(2)]
    many = [dataclasses.replace(r, sample=r.sample + 2 * k) for r in few for k in range(20)]
    a, b = (metrics.summarise(r, CONFIG)["cause_at_1"] for r in (few, many))
    assert a == b and a["high"] - a["low"] > 0.25


def test_paired_difference_is_narrower_than_separate_intervals():
    rng = np.random.default_rng(3)
    base = rng.random(150) < 0.5
    better = base | (rng.random(150) < 0.3)
    first, second = ([record(i, right=bool(x)) for i, x in enumerate(v)] for v in (base, better))
    change = metrics.paired_difference(first, second, CONFIG)
    assert change["value"] == pytest.approx(better.mean() - base.mean())
    alone = metrics.summarise(second, CONFIG)["full_attr_at_1"]
    assert change["low"] > 0 and change["high"] - change["low"] < alone["high"] - alone["low"]
    assert metrics.paired_difference(first, [record(999)], CONFIG) == NULLS


def test_store_round_trip_and_broken_file(tmp_path):
    rows = [record(i, s, right=s > 0, jaccard=0.25) for i in range(3) for s in range(2)]
    summary = metrics.summarise(rows, CONFIG)
    store.save(tmp_path, "sft", summary, rows)
    assert store.load_records(tmp_path, "sft") == rows
    assert store.load_summaries(tmp_path) == {"sft": summary}
    (tmp_path / "evaluation" / "sft.json").write_text('{"cause_at_1":')
    with pytest.raises(ConfigError, match="sft.json"):
        store.load_summaries(tmp_path)
    with pytest.raises(ConfigError, match="No such file.*trace-jax eval` for grpo again") as missing:
        store.load_records(tmp_path, "grpo")
    assert str(missing.value).count("grpo.jsonl") == 1 and "Errno" not in str(missing.value)


def _without(key):
    return lambda s: {k: v for k, v in s.items() if k != key}


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {},
        lambda s: [],
        lambda s: None,
        _without("cause_at_1"),
        _without("by_type"),
        _without("extra"),
        lambda s: s | {"extra": {}},
        lambda s: s | {"parsed": 0.5},
        lambda s: s | {"parsed": {"value": "high", "low": 0, "high": 1}},
        lambda s: s | {"by_cause": []},
        lambda s: s | {"extra": s["extra"] | {"confusion": {"causes": [], "predicted": [], "counts": [[1]]}}},
    ],
)
def test_summaries_of_another_form_are_one_clear_line(tmp_path, change):
    rows = [record(0, 0, right=True)]
    summary = metrics.summarise(rows, CONFIG)
    store.save(tmp_path, "sft", summary, rows)
    (tmp_path / "evaluation" / "sft.json").write_text(json.dumps(change(summary)))
    with pytest.raises(ConfigError, match="^[^\\n]*sft.json holds no results [^\\n]*delete it[^\\n]*$"):
        store.load_summaries(tmp_path)


@pytest.mark.parametrize("line", ["{}", "[]", "7", '{"index": 1}', "\x00", '{"index": "a"}'])
def test_answers_of_another_form_are_one_clear_line(tmp_path, line):
    rows = [record(0, 0, right=True)]
    store.save(tmp_path, "sft", metrics.summarise(rows, CONFIG), rows)
    path = tmp_path / "evaluation" / "sft.jsonl"
    good = json.loads(path.read_text())
    line = json.dumps(good | json.loads(line)) if "a" in line else line
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match="^[^\\n]*sft.jsonl [^\\n]*again[^\\n]*$"):
        store.load_records(tmp_path, "sft")
