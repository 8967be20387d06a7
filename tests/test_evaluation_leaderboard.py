"""The one table: what run directories hold, the paper's figures beside it, tests against agents without a policy."""

import dataclasses
import json

import pytest

from trace_jax import cli
from trace_jax.config import EvaluationConfig
from trace_jax.evaluation import compare, metrics, paper, store

CONFIG = EvaluationConfig(bootstrap=300)


def answers(right, samples=1, calls=2):
    """`right[i]` of the answers to episode i, half of which have no signal, are right."""
    rows = []
    for i, count in enumerate(right):
        kind, cause = ("campaign", "BUDGET_CAP") if i % 2 else ("no_signal", "NO_SIGNAL")
        for s in range(samples):
            good = s < count
            said = cause if good else "BID_INCREASE"
            rows.append(
                metrics.EvalRecord(
                    i, kind, cause, s, True, good, good, None, calls, "finished", said, exact_parsed=good
                )
            )
    return rows


def run_of(path, agents, benchmark="a" * 64):
    for name, rows in agents.items():
        summary = metrics.summarise(rows, CONFIG)
        if benchmark is not None:
            summary["benchmark"] = {"episodes": len({r.index for r in rows}), "sha256": benchmark}
        store.save(path, name, summary, rows)
    return path


N = 40
SCAN, ANALYST = answers([1] * 36 + [0] * 4), answers([1] * 20 + [0] * 20)
GRPO, SFT = answers([2] * 38 + [0] * 2, 2), answers([1] * N, 2)


@pytest.fixture
def run(tmp_path):
    agents = {"scan": SCAN, "analyst": ANALYST, "grpo": GRPO, "sft": SFT, "untrained": answers([0] * N, 2)}
    return run_of(tmp_path / "nano", agents)


def asked(capsys, *words):
    status = cli.main(["eval", "--table", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_one_table(run, tmp_path, capsys):
    status, printed, _ = asked(capsys, run, "--out", tmp_path / "out", "--json")
    assert status == 0
    told = json.loads(printed.splitlines()[-1])
    assert told == json.loads((tmp_path / "out" / "table.json").read_text())
    assert list(told["agents"]) == ["scan", "analyst", "untrained", "SFT", "SFT->GRPO"]
    assert told["agents"]["SFT->GRPO"]["full_attr_at_1"]["value"] == pytest.approx(38 / 40)
    assert told["missing"] == ["contribution", "adtributor", "squeeze", "riskloc", "ceiling"]
    assert "not evaluated: contribution, adtributor" in printed
    text = (tmp_path / "out" / "table.md").read_text()
    rows = [line for line in text.split("\n\n")[0].splitlines()[2:]]
    assert len(rows) == 5 + len(paper.ROWS) and all(line.count("|") == 13 for line in rows)
    assert rows[4].startswith("| SFT->GRPO | 0.950 [") and "† measured on another set" in text
    assert any(line.startswith("| paper: Claude Opus 5, prompted † | 0.764 | 0.686 |") for line in rows)
    assert all("†" in line for line in rows[5:]) and not any("†" in line for line in rows[:5])


def test_the_most_advanced_policy_is_tested(run, capsys):
    told = json.loads(asked(capsys, run, "--json")[1].splitlines()[-1])
    assert [(t["agent"], t["rival"]) for t in told["tests"]] == [("SFT->GRPO", "scan"), ("SFT->GRPO", "analyst")]
    by_hand = compare.compare(ANALYST, GRPO, EvaluationConfig())["metrics"]["full_attr_at_1"]
    assert told["tests"][1]["metrics"]["full_attr_at_1"] == by_hand
    # 2 of 40 more than the scan: nothing that luck could not do; 18 more than the analyst
    assert [t["says"] for t in told["tests"]] == ["no difference shown", "better"]


def test_two_runs_share_the_agents_without_a_policy(run, tmp_path, capsys):
    other = run_of(tmp_path / "other", {"grpo": answers([0] * N, 2), "scan": answers([0] * N), "ceiling": SFT})
    told = json.loads(asked(capsys, run, other, "--json")[1].splitlines()[-1])
    assert list(told["agents"]) == [
        *("scan", "analyst", "ceiling", "nano: untrained", "nano: SFT", "nano: SFT->GRPO", "other: SFT->GRPO")
    ]
    assert told["agents"]["scan"]["full_attr_at_1"]["value"] == pytest.approx(36 / 40)
    assert [t["says"] for t in told["tests"]] == ["no difference shown", "better", "worse", "worse"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["RUN", "OTHER"], "answered other episodes (benchmark bbbbbbbbbbbb) than scan of"),
        (["OLD"], "is of an earlier version and does not say which episodes"),
        (["EMPTY"], "holds no results"),
        (["RUN", "RUN"], "names a run twice"),
        (["RUN", "--run-dir", "RUN"], "--run-dir does not go with --table"),
        (["RUN", "--compare", "scan", "sft"], "--compare does not go with --table"),
    ],
)
def test_refused(words, says, run, tmp_path, capsys):
    few = {"sft": answers([1] * 10)}
    made = {
        "RUN": run,
        "OTHER": run_of(tmp_path / "other", few, "b" * 64),
        "OLD": run_of(tmp_path / "old", few, None),
        "EMPTY": tmp_path / "empty",
    }
    status, _, error = asked(capsys, *[made.get(w, w) for w in words])
    assert status == 2 and says in error and len(error.splitlines()) == 1


def test_out_needs_a_table(tmp_path, capsys):
    assert cli.main(["eval", "--agent", "scan", "--out", str(tmp_path / "x")]) == 2
    assert "--out is of `eval --table`" in capsys.readouterr().err


def test_records_that_lost_their_episode_are_refused(run, capsys):
    store.save(
        run, "scan", store.load_summaries(run)["scan"], [dataclasses.replace(r, index=r.index + 1) for r in SCAN]
    )
    status, _, error = asked(capsys, run)
    assert status == 2 and "different episodes" in error
