"""Paired comparison, calibration and abstention against sums by hand; refusals in one line."""

import dataclasses
import json
import math

import numpy as np
import pytest

from trace_jax import cli
from trace_jax.config import ConfigError, EvaluationConfig
from trace_jax.evaluation import compare, metrics, reliability, store
from trace_jax.recipes import compare as recipe

CONFIG = EvaluationConfig(bootstrap=400)


def answers(right, samples=1, *, exact=True, calls=3, said=None, confidence=None):
    """Records of BUDGET_CAP episodes; `right[i]` of the `samples` answers to episode i are right, the others say
    `said[i]` or NO_SIGNAL."""
    rows = []
    for i, count in enumerate(right):
        for s in range(samples):
            good = s < count
            rows.append(
                metrics.EvalRecord(
                    index=i,
                    type="campaign",
                    cause="BUDGET_CAP",
                    sample=s,
                    parsed=True,
                    cause_right=good,
                    full_right=good,
                    jaccard=None,
                    tool_calls=calls,
                    status="finished",
                    predicted="BUDGET_CAP" if good else (said[i] if said else "NO_SIGNAL"),
                    exact_parsed=exact,
                    confidence=None if confidence is None else confidence[i],
                )
            )
    return rows


@pytest.mark.parametrize(("ahead", "behind"), [(0, 0), (1, 0), (8, 1), (3, 3), (40, 12)])
def test_sign_test_is_the_binomial(ahead, behind):
    """Against the sum of all splits that are no more likely than the one seen."""
    n = ahead + behind
    chance = [math.comb(n, k) / 2**n for k in range(n + 1)]
    by_hand = sum(p for p in chance if p <= chance[ahead] * (1 + 1e-9))
    assert compare.sign_test(ahead, behind) == pytest.approx(min(1.0, by_hand))


def test_sign_test_of_many_episodes_does_not_overflow():
    assert 0 < compare.sign_test(1800, 1200) < 1e-20 and compare.sign_test(3000, 3000) == 1.0


def test_one_sample_each_is_mcnemar():
    """10 episodes only the second has right, 2 only the first: p = 2 P(X >= 10), X ~ B(12, 1/2)."""
    first = answers([0] * 10 + [1] * 2 + [1] * 20)
    second = answers([1] * 10 + [0] * 2 + [1] * 20)
    row = compare.compare(first, second, CONFIG)["metrics"]["full_attr_at_1"]
    assert (row["ahead"], row["behind"]) == (10, 2)
    assert row["p"] == pytest.approx(2 * (66 + 12 + 1) / 4096)
    assert row["difference"]["value"] == pytest.approx(8 / 32)
    assert row["difference"]["low"] < 8 / 32 < row["difference"]["high"]


def test_samples_of_an_episode_are_one_episode():
    """Five samples that all agree are no more evidence than one."""
    five = compare.compare(answers([0, 0, 5], 5), answers([5, 5, 5], 5), CONFIG)["metrics"]["cause_at_1"]
    one = compare.compare(answers([0, 0, 1]), answers([1, 1, 1]), CONFIG)["metrics"]["cause_at_1"]
    assert five == one and five["p"] == 0.5


def test_difference_is_paired():
    """The same agent twice: no difference, no width, p = 1, though each alone has a wide interval."""
    rows = answers([0, 1] * 20)
    row = compare.compare(rows, rows, CONFIG)["metrics"]["full_attr_at_1"]
    assert row["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0} and row["p"] == 1.0


def test_other_episodes_are_refused():
    rows = answers([1, 1, 0])
    moved = [dataclasses.replace(r, index=r.index + 1) for r in rows]
    other = [dataclasses.replace(r, cause="BID_INCREASE") if r.index == 2 else r for r in rows]
    for wrong in (rows[:2], moved, other):
        with pytest.raises(ConfigError, match="different episodes"):
            compare.compare(rows, wrong, CONFIG)
    with pytest.raises(ConfigError, match="benchmark"):
        compare.check_benchmark({"benchmark": {"sha256": "a"}}, {"benchmark": {"sha256": "b"}})
    assert not compare.check_benchmark({}, {"benchmark": {"sha256": "b"}})  # results of earlier versions do not say
    assert compare.check_benchmark({"benchmark": {"sha256": "b"}}, {"benchmark": {"sha256": "b"}})


def test_strict_parsing_costs_what_was_not_exact():
    rows = answers([2, 2], 2)
    rows[0] = dataclasses.replace(rows[0], exact_parsed=False)
    extra = metrics.summarise(rows, CONFIG)["extra"]
    assert extra["strict"]["full_attr_at_1"]["value"] == 0.75
    assert extra["strict"]["lost"]["value"] == 0.25 and extra["strict"]["answers"] == 1


def test_calibration_by_hand():
    """Agreement 1 (right), 1 (wrong), 0.6 (right): errors |0.5 - 1| twice and |1 - 0.6| once."""
    rows = answers([5, 0, 3], 5)
    extra = metrics.summarise(rows, CONFIG)["extra"]
    bins = {b["agreement"]: (b["episodes"], b["accuracy"]) for b in extra["calibration"]["bins"]}
    assert bins == {1.0: (2, 0.5), 0.6: (1, 1.0)}
    assert extra["calibration"]["error"]["value"] == pytest.approx((2 * 0.5 + 0.4) / 3)
    assert extra["voted"]["value"] == pytest.approx(2 / 3)


def test_votes_count_the_slice_too():
    rows = answers([0] * 1, 3, said=["CREATIVE_FATIGUE"])
    rows = [dataclasses.replace(r, driver=d) for r, d in zip(rows, ("geo=US", "geo=JP", "geo=JP"), strict=True)]
    record, agreement = reliability.voted(rows)
    assert record.driver == "geo=JP" and agreement == pytest.approx(2 / 3)


def test_abstaining_from_the_least_sure():
    """Twenty episodes, the surer half right: accuracy 1 up to coverage one half, then falling to one half."""
    sure, right = np.arange(20.0), np.arange(20) >= 10
    points = {p["coverage"]: p["accuracy"] for p in reliability.curve(sure, right)}
    assert points[0.05] == points[0.5] == 1.0
    assert points[0.8] == pytest.approx(10 / 16) and points[1.0] == 0.5
    # Nobody is surer than anybody else: nothing is gained by withholding.
    assert {p["accuracy"] for p in reliability.curve(np.zeros(20), right)} == {0.5}


def test_abstention_takes_what_the_records_hold():
    alone = metrics.summarise(answers([1, 0]), CONFIG)["extra"]
    assert alone["abstention"] == dict.fromkeys(("agreement", "confidence", "selective", "decision"))
    assert alone["calibration"] is None and alone["voted"] is None
    sure = metrics.summarise(answers([1, 0, 1, 1], confidence=[3.0, 1.0, 2.0, None]), CONFIG)["extra"]["abstention"]
    assert sure["agreement"] is None and sure["selective"]["by"] == "confidence"
    assert sure["confidence"][9] == {"coverage": 0.5, "accuracy": 1.0}  # 3.0 and 2.0; None is least


def test_economy_of_calls():
    rows = answers([1, 1], calls=2) + [dataclasses.replace(r, index=5) for r in answers([0], calls=6)]
    found = metrics.summarise(rows, CONFIG)["extra"]["efficiency"]
    assert found["right_per_call"]["value"] == pytest.approx(2 / 10)
    assert found["calls_right"]["value"] == 2 and found["calls_wrong"]["value"] == 6


def test_records_of_earlier_versions_are_read(tmp_path):
    """A line without the newer fields."""
    summary = metrics.summarise(answers([1]), CONFIG)
    store.save(tmp_path, "sft", summary, answers([1]))
    path = tmp_path / "evaluation" / "sft.jsonl"
    line = json.loads(path.read_text())
    del line["driver"], line["confidence"]
    path.write_text(json.dumps(line) + "\n")
    assert store.load_records(tmp_path, "sft") == answers([1])


def test_the_command_compares_runs_and_agents(tmp_path, capsys):
    for run, agent, right in (("a", "sft", [0, 0, 1]), ("a", "scan", [1, 1, 1]), ("b", "grpo", [0, 1, 1])):
        rows = answers(right)
        store.save(tmp_path / run, agent, metrics.summarise(rows, CONFIG), rows)
    a, b = tmp_path / "a", tmp_path / "b"
    result = recipe.command((str(a), str(b)), None, CONFIG, 0)
    assert result["compare"] == ["a:sft", "b:grpo"] and result["metrics"]["full_attr_at_1"]["ahead"] == 1
    printed = capsys.readouterr().out
    assert "FullAttr@1" in printed and compare.UNVERIFIED in printed and not result["verified"]
    assert recipe.command(("sft", "scan"), a, CONFIG, 0)["metrics"]["full_attr_at_1"]["ahead"] == 2
    assert recipe.command((f"{a}:scan", str(b)), None, CONFIG, 0)["compare"] == ["a:scan", "b:grpo"]
    for wrong in (("sft", "nobody"), (f"{a}:nobody", str(b)), (str(tmp_path), str(b))):
        with pytest.raises(ConfigError):
            recipe.command(wrong, a, CONFIG, 0)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["eval", "--compare", "nowhere", "nothing"], "--compare nowhere"),
        (["eval", "--compare", "one"], "expected 2 arguments"),
        (["eval", "--agent", "endpoint", "--endpoint", "http://localhost:1/v1"], "--model"),
        (["eval", "--agent", "endpoint", "--endpoint", "localhost", "--model", "m"], "http://"),
        (["eval", "--agent", "scan", "--model", "m"], "--agent endpoint"),
        (["fit-rules", "--episodes", "3"], "at least 50"),
    ],
)
def test_bad_usage_is_one_line(argv, part, capsys):
    assert cli.main(argv) == 2
    told = capsys.readouterr().err
    assert part in told and told.count("\n") == 1
