"""The HTML page: one file that needs nothing else, with the run's own numbers in it."""

import base64
import dataclasses
import hashlib
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.config import ConfigError, EvaluationConfig, TokenizerConfig
from trace_jax.evaluation import metrics, store
from trace_jax.policy.chat import CONTROL, NanoChat
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.report import html, svg, turns
from trace_jax.rollout import trajectory

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Checker(HTMLParser):
    """Balanced tags, scripts, and every attribute that could make a browser fetch something."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.loads, self.text, self.scripts, self.policy = [], [], [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        named = dict(attrs)
        fetched = ("src", "href", "xlink:href", "action", "data", "srcset", "poster", "formaction", "ping")
        self.loads += [(tag, k, v) for k, v in attrs if k in fetched and not (tag == "a" and v.startswith("#"))]
        assert not [k for k in named if k.startswith("on")], f"an inline handler on {tag}"
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named["content"]
        if tag == "script":
            self.scripts.append((named, ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"unbalanced {tag}"

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            attributes, text = self.scripts.pop()
            self.scripts.append((attributes, text + data))
        elif self.open[-1:] != ["style"]:
            self.text.append(data)


def check(page: str) -> Checker:
    """Nothing is fetched, and no script runs but the page's own; what a run holds is text, or data in base64."""
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert not checker.loads and not {"link", "iframe", "img", "object", "embed", "base"} & set(checker.tags)
    assert "url(" not in page and "@import" not in page
    own = [text for attributes, text in checker.scripts if "type" not in attributes]
    data = [text for attributes, text in checker.scripts if attributes.get("type") == "text/plain"]
    assert len(own) == 1 and len(own) + len(data) == len(checker.scripts)
    assert all(re.fullmatch(r"[A-Za-z0-9+/=]+", text) for text in data)
    digest = base64.b64encode(hashlib.sha256(own[0].encode()).digest()).decode()
    assert checker.policy.split("; ") == [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        f"script-src 'sha256-{digest}'",
    ]
    return checker


def test_scripts_make_no_markup_of_texts():
    code = "".join((html.PAGE / name).read_text() for name in html.SCRIPTS)
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "</script")
    assert not [word for word in (*forbidden, "fetch(", "XMLHttpRequest", "import(") if word in code]
    assert {p.name for p in html.PAGE.iterdir()} == {*html.SCRIPTS, "page.html", "page.css"}


def records(share):
    return [
        metrics.EvalRecord(
            index=i, type="campaign", cause="BID_INCREASE", sample=s, parsed=True, cause_right=s < 5 * share,
            full_right=s < 5 * share, jaccard=None, tool_calls=4, status="finished",
            predicted="BID_INCREASE" if s < 5 * share else "BUDGET_CAP",
        )
        for i in range(12) for s in range(5)
    ]  # fmt: skip


HOSTILE = "<script>alert(1)</script> & http://example.com/x"


@pytest.fixture(scope="module")
def chat():
    texts = ["Find it.", "Why?", "sql('x')", HOSTILE, '{"decision": 1}'] * 3
    return NanoChat(SentencePieceTokenizer.train(texts, TokenizerConfig(vocab_size=400, fragments=0), list(CONTROL)))


def sampled(chat, result=HOSTILE, **fields):
    """A trajectory of one call and an answer."""
    ids, mask, turn = chat.encode_transcript("Find it.", "Why?", [("sql('x')", result)], '{"decision": 1}')
    base = dict(versions=(0, 0), status="finished", task_index=17, reward=1.0, tool_calls=1, info={"full_right": True})
    base["labels"] = {"type": "segment_1d", "cause": "CREATIVE_FATIGUE", "driver": [["geo", "US"]]}
    streams = dict(ids=ids, loss_mask=mask, logprobs=np.zeros(len(ids), np.float32), turn_index=turn)
    return trajectory.Trajectory(**streams, **base | fields)


@pytest.fixture
def run_dir(tmp_path, chat):
    run = tmp_path / "nano-1"
    run.mkdir()
    (run / "config.yaml").write_text("name: nano\nnote: <b>bold</b>\n")
    lines = [{"stage": "sft", "step": i, "loss": 2.0 / (i + 1), "grad": {"norm": 1.0}} for i in range(30)]
    lines += [{"stage": "grpo", "step": i, "reward": None if i == 3 else i / 10} for i in range(10)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"stage": "grpo", "st')
    for agent, share in (("untrained", 0.0), ("sft", 0.6), ("grpo", 0.8)):
        store.save(run, agent, metrics.summarise(records(share), EvaluationConfig(bootstrap=50)), records(share))
    trajectory.write_parquet(run / "trajectories" / "grpo-000009.parquet", [sampled(chat)], 9)
    chat.tokenizer.save(run / "tokenizer.model")
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
    assert hosts == {"http://example.com/x", "http://www.w3.org/2000/svg"}  # the second is a name, nothing is there


def test_page_of_a_run_that_has_only_begun(tmp_path):
    (tmp_path / "config.yaml").write_text("name: nano\n")
    page = html.build(tmp_path)
    check(page)
    assert "Nothing was evaluated" in page and "<svg" not in page


def test_no_run_directory_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match="check --run-dir") as e:
        html.write(tmp_path / "missing")
    assert "\n" not in str(e.value)


def test_turns_say_who_spoke(chat):
    assert turns.said(sampled(chat, "ok"), chat) == [
        ("system", "Find it.", False),
        ("user", "Why?", False),
        ("call", "sql('x')", True),
        ("result", "ok", False),
        ("answer", '{"decision": 1}', True),
    ]
    cut = sampled(chat, "ok")
    short = dataclasses.replace(
        cut, status="truncated", **{f: getattr(cut, f)[:-1] for f in ("ids", "loss_mask", "logprobs", "turn_index")}
    )
    assert turns.said(short, chat)[-1][0] == "malformed"


def test_every_type_shows_a_right_and_a_wrong_case(run_dir, chat):
    kinds = [("campaign", True), ("campaign", True), ("campaign", False), ("mix", False)]
    rows = [
        sampled(chat, task_index=i, info={"full_right": right}, labels={"type": kind, "cause": "BUDGET_CAP"})
        for i, (kind, right) in enumerate(kinds)
    ]
    trajectory.write_parquet(run_dir / "trajectories" / "grpo-000010.parquet", rows, 10)
    page = html.build(run_dir)
    check(page)
    assert page.count('class="case"') == 3 and "grpo-000010.parquet" in page


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


def test_lines_that_are_no_records_are_skipped_with_a_note(run_dir):
    path = run_dir / "metrics.jsonl"
    broken = [
        b"\xff\xfe{",
        b"[1, 2]",
        b"7",
        b"null",
        b'{"stage": "sft"}',
        b"[" * 9000,
        b'{"stage": "sft", "step": 1e999}',
    ]
    strange = b'{"stage": "sft", "step": 31, "loss": 1e308, "x": ' + b"9" * 400 + b"}"
    path.write_bytes(b"\n".join([*broken, strange, path.read_bytes()]))
    with pytest.warns(UserWarning, match=f"skipped {len(broken)} lines of metrics.jsonl .*line 1"):
        page = html.build(run_dir)
    checker = check(page)
    assert checker.tags.count("svg") == 3 and f"skipped {len(broken)} lines" in page


def test_trajectories_of_another_tokenizer_are_one_clear_line(run_dir, chat):
    other = sampled(chat)
    ids = np.where(np.arange(len(other.ids)) == 3, 10**6, other.ids).astype(np.int32)
    trajectory.write_parquet(run_dir / "trajectories" / "grpo-000010.parquet", [dataclasses.replace(other, ids=ids)])
    with pytest.raises(ConfigError, match="another tokenizer .*delete it"):
        html.build(run_dir)


def test_a_summary_without_bounds_has_a_page(run_dir):
    path = run_dir / "evaluation" / "grpo.json"
    summary = json.loads(path.read_text())
    summary["no_signal"] = {"value": 0.5, "low": None, "high": None}
    path.write_text(json.dumps(summary))
    check(html.build(run_dir))
