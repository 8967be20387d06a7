"""The HTML page: one file that needs nothing else, with the run's own numbers in it."""

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.config import ConfigError, EvaluationConfig
from trace_jax.evaluation import metrics, store
from trace_jax.report import html, svg
from trace_jax.rollout import trajectory

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Checker(HTMLParser):
    """Balanced tags, and every attribute that could make a browser fetch something."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.loads, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [(tag, k, v) for k, v in attrs if k in ("src", "href", "xlink:href", "action", "data", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"unbalanced {tag}"

    def handle_data(self, data):
        self.text.append(data)


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert not checker.loads and not {"script", "link", "iframe", "img", "object"} & set(checker.tags)
    assert "url(" not in page and "@import" not in page
    return checker


def records(share):
    return [
        metrics.EvalRecord(
            index=i, type="campaign", cause="BID_INCREASE", sample=s, parsed=True, cause_right=s < 5 * share,
            full_right=s < 5 * share, jaccard=None, tool_calls=4, status="finished",
            predicted="BID_INCREASE" if s < 5 * share else "BUDGET_CAP",
        )
        for i in range(12) for s in range(5)
    ]  # fmt: skip


def sampled(text="<script>alert(1)</script> & http://example.com/x"):
    """A trajectory whose ids are code points: prompt, call, result, answer."""
    parts = [("Why?", -1, False), ("sql('x')", 0, True), (text, 0, False), ('{"decision": 1}', 1, True)]
    ids = [ord(c) for part, _, _ in parts for c in part]
    turn = [t for part, t, _ in parts for _ in part]
    mask = [m for part, _, m in parts for _ in part]
    return trajectory.Trajectory(
        ids=np.array(ids, np.int32), loss_mask=np.array(mask), logprobs=np.zeros(len(ids), np.float32),
        turn_index=np.array(turn, np.int32), versions=(0, 0), status="finished", task_index=17, reward=1.0,
        tool_calls=1, answer='{"decision": 1}', info={"full_right": True},
        labels={"type": "segment_1d", "cause": "CREATIVE_FATIGUE", "driver": [["geo", "US"]]},
    )  # fmt: skip


def codepoints(ids):
    return "".join(map(chr, ids))


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    run = tmp_path / "nano-1"
    run.mkdir()
    (run / "config.yaml").write_text("name: nano\nnote: <b>bold</b>\n")
    lines = [{"stage": "sft", "step": i, "loss": 2.0 / (i + 1), "grad": {"norm": 1.0}} for i in range(30)]
    lines += [{"stage": "grpo", "step": i, "reward": None if i == 3 else i / 10} for i in range(10)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"stage": "grpo", "st')
    for agent, share in (("untrained", 0.0), ("sft", 0.6), ("grpo", 0.8)):
        store.save(run, agent, metrics.summarise(records(share), EvaluationConfig(bootstrap=50)), records(share))
    trajectory.write_parquet(run / "trajectories" / "grpo-000009.parquet", [sampled()], 9)
    (run / "tokenizer.model").write_bytes(b"")
    monkeypatch.setattr(html, "_decoder", lambda model: codepoints)
    return run


def test_page_is_self_contained_and_holds_every_part(run_dir):
    out = html.write(run_dir)
    assert out == run_dir / "report.html" and not list(run_dir.glob("*.partial"))
    page = out.read_text()
    checker = check(page)
    text = " ".join("".join(checker.text).split())
    assert checker.tags.count("svg") == 3  # loss, grad/norm, reward
    for expected in ("0.800", "SFT->GRPO minus SFT", "+0.200", "paper SFT->RL", "0.757", "Confusion matrix: SFT->GRPO"):
        assert expected in text
    assert "CREATIVE_FATIGUE in geo=US" in text and "grpo-000009.parquet" in text and "grad/norm" in text
    # What an agent or a config wrote is shown, never interpreted.
    assert "<script>alert(1)</script> & http://example.com/x" in text and "<b>bold</b>" in text
    assert "&lt;script&gt;alert(1)" in page
    hosts = set(re.findall(r"https?://[^\s<\"']+", page))
    assert hosts == {"http://example.com/x"}


def test_page_of_a_run_that_has_only_begun(tmp_path):
    (tmp_path / "config.yaml").write_text("name: nano\n")
    page = html.build(tmp_path)
    check(page)
    assert "Nothing was evaluated" in page and "<svg" not in page


def test_no_run_directory_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match="check --run-dir") as e:
        html.write(tmp_path / "missing")
    assert "\n" not in str(e.value)


def test_turns_split_where_the_speaker_changes():
    assert html.turns(sampled("ok"), codepoints) == [
        ("task", "Why?", False),
        ("call", "sql('x')", True),
        ("result", "ok", False),
        ("answer", '{"decision": 1}', True),
    ]


def test_chart_is_well_formed_and_keeps_gaps():
    points = [(i, math.sin(i)) for i in range(10)] + [(10, math.nan)] + [(i, 0.5) for i in range(11, 15)]
    root = ET.fromstring(svg.line_chart(points, title='a "b" <c>'))
    assert root.get("aria-label") == 'a "b" <c>'
    curves = [e for e in root if e.get("class") == "curve"]
    assert [len(c.get("points").split()) for c in curves] == [10, 4]
    assert svg.line_chart([(0, math.nan)], title="x") == ""


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e9, 1e9)), min_size=1, max_size=50))
def test_every_point_lies_inside_the_frame(points):
    root = ET.fromstring(svg.line_chart(points, title="t"))
    for e in root:
        for place in (e.get("points") or "").split():
            x, y = map(float, place.split(","))
            assert -0.1 <= x - svg.LEFT <= svg.WIDTH - svg.LEFT - svg.RIGHT + 0.1
            assert svg.TOP - 0.1 <= y <= svg.HEIGHT - svg.BOTTOM + 0.1


def test_thinning_keeps_the_mean_and_ticks_are_round():
    points = [(i, float(i % 7)) for i in range(3000)]
    few = svg.thin(points)
    assert len(few) == 300 and np.mean([y for _, y in few]) == pytest.approx(np.mean([y for _, y in points]))
    assert svg.nice_ticks(0.03, 1.0) == [0.5, 1.0]
    assert svg.nice_ticks(0, 10) == [0, 5, 10]
