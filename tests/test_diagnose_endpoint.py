"""`trace-jax diagnose --agent endpoint`: a model behind an endpoint investigates, once a person has agreed to it."""

import json

import pytest
from helpers_diagnose import HALVES, MOBILE, rows, runner, said, text
from helpers_endpoint import call, say, serving

from trace_jax.environments.ads.answer import format_answer

QUERY = 'sql("select device, sum(clicks) c from segment_daily group by 1 order by 1")'
ANSWER = format_answer("CREATIVE_FATIGUE", [("device", "MOBILE")], [], "")


@pytest.fixture
def diagnose(tmp_path, capsys):
    run = runner(tmp_path, capsys)
    table = [row | {"campaign": "Secret launch"} for row in rows(effect=MOBILE)]
    content = text(table, names={"device": "Device"})

    def asked(url, *argv):
        endpoint = ("--agent", "endpoint", "--endpoint", url, "--model", "m", "--endpoint.retries", "0")
        return run(content, argv=(*endpoint, *HALVES, *argv))

    return asked


def by_tool(number, body):
    """Asks once, then answers."""
    return say(ANSWER) if any(m["role"] == "tool" for m in body["messages"]) else call(QUERY)


def by_text(number, body):
    return say(ANSWER) if len(body["messages"]) > 2 else say(f"Let me look.\n```python\n{QUERY}\n```")


@pytest.mark.parametrize(("reply", "protocol"), [(by_tool, "tools"), (by_text, "text")])
def test_a_model_investigates_the_agents_tables_and_sees_nothing_else(reply, protocol, diagnose):
    with serving(reply) as (url, seen):
        status, found, out, _ = diagnose(url, "--send", "--endpoint.protocol", protocol)
    assert status == 0 and said(found) == ("CREATIVE_FATIGUE", {"device": "Mobile phones"})
    assert found["agent"] == "endpoint" and found["confidence"]["votes"] == 3 and len(seen) == 6
    for one in found["investigations"]:
        ((code, rows_seen),) = one["steps"]
        assert code.strip() == QUERY and "MOBILE" in rows_seen and "DESKTOP" in rows_seen
    assert f"sent to {url}" in out and "6 requests" in out and f"investigation (m at {url})" in out
    sent = json.dumps(seen)
    assert "MOBILE" in sent and not any(name in sent for name in ("Secret", "Mobile phones", "file0", "Germany"))
    assert all("Campaign C1" in body["messages"][1]["content"] for body in seen)  # the full wording


def test_nothing_is_sent_before_somebody_agrees(diagnose, monkeypatch):
    with serving(by_tool) as (url, seen):
        status, _, out, err = diagnose(url)  # --yes is about the columns
        assert status == 2 and "add --send" in err and err.count("\n") == 1 and f"sent to {url}" in out
        monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
        for reply in ("", "n"):
            monkeypatch.setattr("builtins.input", lambda prompt, reply=reply: reply)
            status, _, _, err = diagnose(url)
            assert status == 2 and "nothing was sent" in err
        assert seen == []
        monkeypatch.setattr("builtins.input", lambda prompt: "y")
        assert diagnose(url)[0] == 0 and len(seen) == 6


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (("--agent", "endpoint", "--endpoint", "http://127.0.0.1:9/v1"), "name it with --model"),
        (("--agent", "endpoint", "--model", "m"), "name it with --endpoint"),
        (("--agent", "analyst", "--model", "m"), "--model is of `diagnose --agent endpoint`"),
        (("--agent", "analyst", "--send"), "--send is of"),
        (("--agent", "endpoint", "--run-dir", "x"), "no run in x"),
    ],
)
def test_half_an_endpoint_is_refused_before_the_file_is_read(argv, part, tmp_path, capsys):
    status, _, out, err = runner(tmp_path, capsys)(b"", argv=argv)
    assert status == 2 and part in err and out == "" and err.count("\n") == 1


def test_an_endpoint_that_does_not_answer_or_refuses_is_one_line(diagnose):
    status, _, _, err = diagnose("http://127.0.0.1:9/v1", "--send")
    assert status == 2 and "did not answer after 1 tries" in err
    assert "kept" not in err
    with serving(lambda number, body: (401, {}, "no")) as (url, _):
        status, _, _, err = diagnose(url, "--send")
    assert status == 2 and "$OPENAI_API_KEY" in err
