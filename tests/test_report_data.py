"""What a page holds as data: which trajectories, packed so that they come out as they were; series, times, failures."""

import dataclasses
import json
import math

import helpers_report
import numpy as np
import pytest
from helpers_episodes import fake_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import ConfigError, RunConfig
from trace_jax.evaluation import metrics, search_metrics, store
from trace_jax.evaluation.kinds import KINDS
from trace_jax.recipes import phases
from trace_jax.report import browse, curves, html, recorded, results, subjects, turns
from trace_jax.report.episode_facts import _groups
from trace_jax.report.packed import Words, finite, pack, unpack
from trace_jax.rollout import trajectory
from trace_jax.warehouse.splits import EpisodeSet


@pytest.fixture(scope="module")
def chat():
    return helpers_report.make_chat()


def shown(chat, rows, step=None, advantages=None):
    source = recorded.Source(helpers_report.Path(f"grpo-{step:06d}.parquet" if step else "grpo.parquet"), 1, step)
    advantages = advantages or [None] * len(rows)
    return [recorded.Shown(source, t, a) for t, a in zip(rows, advantages, strict=True)]


@settings(max_examples=25, deadline=None)
@given(st.recursive(st.none() | st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
                    lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=20))  # fmt: skip
def test_what_is_packed_comes_out_again(value):
    def whole(x):  # half a surrogate pair is no text
        return json.loads(json.dumps(x, ensure_ascii=False).encode("utf-8", "replace"))

    text = pack(value)
    assert unpack(text) == whole(value) and pack(value) == text and text.isascii() and "<" not in text


def test_numbers_of_a_page():
    assert finite(0.123456789) == 0.12346 and finite(math.nan) is None and finite(None) is None
    with pytest.raises(ValueError):
        pack([math.inf])
    words = Words()
    assert [words(x) for x in ("a", "b", "a")] == [0, 1, 0] and words.texts == ["a", "b"]


def test_trajectories_come_out_as_they_were(chat):
    rows = [
        helpers_report.attempt(chat, 3, s, right=s > 0, steps=[("look()", helpers_report.HOSTILE)] * 3, probes=probes)
        for s, probes in enumerate([(-2.0, -1.0, -1.5, -0.5), (), (-1.0,)])  # the last ones are of another trajectory
    ]
    rows.append(helpers_report.attempt(chat, 4, steps=()))
    rows.append(dataclasses.replace(rows[0], logprobs=np.full(len(rows[0]), np.nan, np.float32), labels={}, info={}))
    series = {("train", 3): {"start": "2026-01-01"}}
    run = browse.Run(0, KINDS["ads"], chat, RunConfig(), shown(chat, rows, 7, [0.5] * 5), series)
    index, parts, left_out = browse.encode([run])
    assert left_out == 0 and len(parts) == 1
    column, words = index["columns"], index["words"]
    assert [words[i] for i in column["stage"]] == ["GRPO step 7"] * 5
    assert [words[i] for i in column["outcome"]] == ["wrong cause", "right", "right", "right", "finished"]
    assert column["episode"] == [0, 0, 0, 1, 2] and column["task"] == [3, 3, 3, 4, 3]
    part = unpack(parts[0])
    assert part["series"] == {"0": series["train", 3], "2": series["train", 3]}
    for i, t in enumerate(rows):
        entry = part["entries"][column["entry"][i]]
        text = lambda n: part["words"][n]  # noqa: E731
        assert [(text(a), text(b)) for a, b in entry["prompt"]] == [
            ("system", "Find it."),
            ("user", text(entry["prompt"][1][1])),
        ]
        assert text(entry["answer"]) == t.answer and entry["advantage"] == 0.5
        found = []
        for s in entry["steps"]:
            found += [(text(s[0]), text(s[1]), True)] + ([("result", text(s[8]), False)] if s[8] is not None else [])
        assert found == turns.said(t, chat)[2:]
        sampled = [t.logprobs[(t.turn_index == k) & t.loss_mask] for k in range(len(entry["steps"]))]
        assert [s[3] for s in entry["steps"]] == [len(x) for x in sampled]
        if i < 4:
            assert [s[4] for s in entry["steps"]] == pytest.approx([float(x.mean()) for x in sampled], rel=1e-3)
            assert [s[6] for s in entry["steps"]] == pytest.approx([float(x.min()) for x in sampled], rel=1e-3)
        else:
            assert {s[4] for s in entry["steps"]} == {None} and column["logprob"][i] is None
    credits = [[s[12] for s in part["entries"][i]["steps"]] for i in range(3)]
    assert all(credits[0][:3]) and credits[0][3] is None and {*credits[1], *credits[2]} == {None}
    assert {s[13] for s in part["entries"][1]["steps"]} == {0.5}  # turn credit is off: the outcome alone


def test_what_is_too_large_is_left_out(chat, monkeypatch):
    rows = [helpers_report.attempt(chat, i, steps=[("x" * 2000, "y" * 3000)]) for i in range(30)]
    run = browse.Run(0, KINDS["ads"], chat, None, shown(chat, rows), {})
    whole, parts, none = browse.encode([run])
    assert none == 0 and len(whole["columns"]["run"]) == 30
    monkeypatch.setattr(browse, "PART", 20_000)
    _, parts, _ = browse.encode([run])
    budget = sum(map(len, parts)) // 2
    index, some, left_out = browse.encode([run], budget=budget)
    kept = len(index["columns"]["run"])
    assert 0 < kept < 30 and left_out == 30 - kept and sum(map(len, some)) <= budget
    assert index["columns"]["task"] == list(range(kept))


def test_every_stage_has_its_share(tmp_path, chat):
    run = helpers_report.make_run(tmp_path / "run", chat, tasks=10, samples=2)
    for step in range(1, 41):
        rows = [helpers_report.attempt(chat, 8 * step + g, s, group=g) for g in range(2) for s in range(3)]
        trajectory.write_parquet(run / "trajectories" / f"grpo-{step:06d}.parquet", rows, step)
    everything = recorded.read(run, chat, RunConfig(), 10_000)
    assert everything.total == 40 + 40 * 6 and not everything.notes
    steps = {x.source.step for x in everything.shown} - {None}
    assert len(steps) == recorded.TRAINING_FILES and {1, 40} <= steps
    assert everything.newest.path.stem == "grpo"
    few = recorded.read(run, chat, RunConfig(), 60).shown
    held = [x for x in few if x.source.step is None]
    # the first answer of both agents to every episode, then second ones
    assert len(held) == 30 and [x.trajectory.sample for x in held if x.source.path.stem == "sft"] == [0] * 10
    training = [x for x in few if x.source.step is not None]
    assert len(few) <= 60 and training
    tiny = recorded.read(run, chat, RunConfig(), 1)
    assert len(tiny.shown) == 1 and tiny.shown[0].source.path.stem == "grpo"


def test_groups_stay_whole(chat):
    rows = shown(chat, [helpers_report.attempt(chat, g, s, group=g) for g in range(3) for s in range(4)], 1)
    assert [x.trajectory.group for x in recorded._groups(rows, 9)] == [0] * 4 + [1] * 4
    assert len(recorded._groups(rows, 3)) == 3


def test_a_damaged_file_is_left_out_with_a_note(tmp_path, chat):
    run = helpers_report.make_run(tmp_path / "run", chat)
    (run / "trajectories" / "sft.parquet").write_bytes(b"PAR1 nothing")
    with pytest.warns(UserWarning, match="left out sft.parquet, which is damaged"):
        page = html.build(run)
    assert "Note: left out sft.parquet" in page and "GRPO step 4" not in page  # that is packed


def test_phases_are_those_that_the_recipes_book():
    assert sorted(curves.LEARNER + curves.SAMPLER) == sorted(phases.PHASES)


def test_time_goes_on_after_a_resume(tmp_path):
    seconds = [10, 20, 30, 4, 14, None]
    lines = [
        {
            "stage": "grpo",
            "step": i,
            "seconds": s,
            "x": i,
            "seconds/learn": 6.0,
            "seconds/save": 0.0,
            "seconds/tools": 9.0,
        }
        for i, s in enumerate(seconds)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    read = curves.read(path)
    assert read.stages["grpo"]["x"].times[:5] == [10, 20, 30, 34, 44] and math.isnan(read.stages["grpo"]["x"].times[5])
    assert read.stages["grpo"]["x"].thinned()["time"] == [10, 20, 30, 34, 44, None]
    [found] = read.phases
    assert (found.steps, found.elapsed, found.median) == (4, 34, 10)
    assert [(p.name, p.total, p.median) for p in found.learner] == [("learn", 24, 6)] and found.rest == 10
    assert [(p.name, round(p.share, 3)) for p in found.sampler] == [("tools", round(36 / 34, 3))]
    assert list(read.drawn()["grpo"]) == ["x", "seconds/learn", "seconds/save", "seconds/tools"]
    assert curves.family("reward") == "" and curves.family("tools/queue") == "tools" and curves.family("x") == "more"


def test_series_are_those_of_the_episode():
    batch, verdict = fake_batch(5, missing=True)
    for record in EpisodeSet(batch, verdict):
        found = subjects.ads_series(record)
        present = np.asarray(batch.day_mask[record.position])
        groups = _groups(record, present)
        assert set(found["groups"]) == set(groups) - {"rest"} and found["half"] == 4
        for group, series in found["groups"].items():
            for name, values in series.items():
                assert [v is None for v in values] == list(~present)
                known = np.array([math.nan if v is None else v for v in values])
                np.testing.assert_allclose(known, groups[group][name], atol=0.006)
        assert found["start"] == record.visible()["daily_campaign"]["ds"].to_pylist()[0].isoformat() or not present[0]
        assert found["onset"] == record.onset


def test_series_of_other_episodes_are_not_drawn(monkeypatch, tmp_path):
    episodes = EpisodeSet(*fake_batch(5), "test")
    other = EpisodeSet(*fake_batch(5, seed=1), "test").take([1, 0, 2, 3, 4])
    monkeypatch.setattr(subjects, "kept_splits", lambda *a: iter([other, episodes]))
    labels = {
        i: {"cause": r.cause, "type": r.type, "driver": [list(p) for p in r.driver]} for i, r in enumerate(episodes)
    }
    found, why = subjects.series(RunConfig(), "test", labels, tmp_path)
    assert found == {i: subjects.ads_series(r) for i, r in enumerate(episodes)} and why == ""
    for wanted in (labels | {2: labels[0]}, labels | {7: labels[0]}):
        assert subjects.series(RunConfig(), "test", wanted, tmp_path) == ({}, subjects.NOT_KEPT)


def test_sources_tell_runs_with_other_episodes_apart():
    config = RunConfig()
    assert subjects.source(config, "test") == subjects.source(config.replace(seed=5), "test")
    other = config.replace(data=dataclasses.replace(config.data, test=9))
    assert subjects.source(config, "test") != subjects.source(other, "test")
    assert subjects.source(config, "train") == subjects.source(other, "train")


def test_outcomes():
    base = dict(index=0, type="segment_1d", cause="CREATIVE_FATIGUE", sample=0, parsed=True, cause_right=False,
                full_right=False, jaccard=None, tool_calls=1, status="finished", predicted="BID_INCREASE")  # fmt: skip
    cases = {
        "right": dict(full_right=True, cause_right=True),
        "wrong slice": dict(cause_right=True),
        "wrong cause": {},
        "false alarm": dict(cause="NO_SIGNAL"),
        "missed": dict(predicted="NO_SIGNAL"),
        "unreadable": dict(parsed=False, predicted=None),
        "malformed turn": dict(status="malformed", parsed=False),
        "cut off": dict(status="truncated", parsed=False),
        "timed out": dict(status="timed_out", parsed=False),
        "tool failure": dict(status="tool_failure", parsed=False),
    }
    assert {n: metrics.outcome(metrics.EvalRecord(**base | c)) for n, c in cases.items()} == {n: n for n in cases}
    assert tuple(cases) == metrics.OUTCOMES
    search = dict(index=0, hops=2, sample=0, parsed=True, right=False, tool_calls=1, status="finished")
    cases = {"right": dict(right=True), "wrong answer": {}, "unreadable": dict(parsed=False)}
    assert [search_metrics.outcome(search_metrics.SearchRecord(**search | c)) for c in cases.values()] == list(cases)


def test_failures_by_cause(tmp_path, chat):
    run = helpers_report.make_run(tmp_path / "run", chat)
    evaluated = results.Evaluated("run", run, store.load_summaries(run), KINDS["ads"])
    found, why = results.failures(evaluated)
    assert why == "" and found["agent"] == "SFT->GRPO" and found["title"] == "cause"
    assert (
        sum(row["answers"] for row in found["rows"]) == 24
        and dict((n, c) for n, _, c in found["outcomes"])["right"] == 16
    )
    rights = [row["right"] for row in found["rows"]]
    assert rights == sorted(rights) and all(
        sum(s for _, _, s in row["parts"]) == pytest.approx(1) for row in found["rows"]
    )
    bid = next(row for row in found["rows"] if row["name"] == "BID_INCREASE")  # tasks 0, 4, 8: 0 is wrong
    assert bid["right"] == pytest.approx(2 / 3) and bid["instead"] == "CREATIVE_FATIGUE 2"
    (run / "evaluation" / "grpo.jsonl").unlink()
    assert results.failures(evaluated)[0] is None and "run `trace-jax eval`" in results.failures(evaluated)[1]


def test_two_runs_on_a_page(tmp_path, chat):
    first = helpers_report.make_run(tmp_path / "a" / "run", chat)
    second = helpers_report.make_run(tmp_path / "b" / "run", chat, wrong=4)
    page = html.build(first, compare=second)
    assert "<title>a/run against b/run - trace-jax</title>" in page and ">SFT, a/run</th><th>SFT, b/run<" in page
    assert page.count('class="curve other"') == 7 and "ahead:behind" in page
    index = unpack(page.split('id="index">')[1].split("<")[0])
    columns = index["columns"]
    assert columns["run"] == [0] * 52 + [1] * 52 and len(set(columns["episode"])) == 13  # 12 held-out, one of training
    assert index["curves"][1]["grpo"]["reward"]["time"][0] == 70
    with pytest.raises(ConfigError, match="no run in"):
        html.build(first, compare=tmp_path)
