"""Labels from an endpoint, against a small server that answers, stalls, refuses and mumbles."""

import json
import threading
import time

import pytest
from helpers_endpoint import serving

from trace_jax.capability import endpoint
from trace_jax.config import CapabilityConfig, ConfigError
from trace_jax.environments.capability import Attempt, Capability, Label

NAMES = ("first", "second")
CAPABILITIES = [Capability(n, n, f"what {n} is", "", lambda attempt: Label.NA) for n in NAMES]
GOOD = {"first": "PRESENT", "second": "LACKING"}


def attempt(number=0):
    return Attempt(f"question {number}", (("sql('select 1')", "1"),), "the answer", "answered", {"cause": "X"}, True)


def server(reply):
    """An endpoint; `reply(number of the request, body)` gives (status, headers, text of the message or None)."""

    def raw(number, body):
        status, headers, text = reply(number, body)
        return (
            status,
            headers,
            json.dumps({"choices": [{"message": {"content": text}}]}) if text is not None else "oops",
        )

    return serving(
        raw, lambda request, body: {"body": body, "path": request.path, "key": request.headers.get("Authorization")}
    )


def config(url, **fields):
    defaults = {"runs": 1, "keep": 1, "retries": 3, "timeout_seconds": 5.0, "workers": 1}
    return CapabilityConfig(labeller="endpoint", endpoint=url, model="judge", **(defaults | fields))


def test_runs_are_independent_requests_and_kept(tmp_path, monkeypatch):
    """Every run asks for every attempt with a seed of its own; a second labelling asks for nothing."""
    monkeypatch.setenv("MY_KEY", "secret")
    with server(lambda n, body: (200, {}, f"Sure:\n```json\n{json.dumps(GOOD)}\n```")) as (url, seen):
        settings = config(url, runs=3, key_variable="MY_KEY", workers=2)
        attempts = [attempt(0), attempt(1)]
        labels, unread = endpoint.label(attempts, CAPABILITIES, settings, tmp_path / "replies.jsonl")
        assert labels.shape == (3, 2, 2) and unread == 0
        assert (labels == [Label.PRESENT, Label.LACKING]).all()
        assert len(seen) == 6 and len({s["body"]["seed"] for s in seen}) == 3
        assert {s["key"] for s in seen} == {"Bearer secret"} and {s["path"] for s in seen} == {"/v1/chat/completions"}
        shown = seen[0]["body"]["messages"][1]["content"]
        assert "sql('select 1')" in shown and '"cause": "X"' in shown and "passed" not in shown
        ticks = []
        again, _ = endpoint.label(
            attempts, CAPABILITIES, settings, tmp_path / "replies.jsonl", on_progress=lambda *a: ticks.append(a)
        )
        assert len(seen) == 6 and (again == labels).all() and ticks == [(6, 6)]
        endpoint.label(attempts, CAPABILITIES, config(url, runs=4), tmp_path / "replies.jsonl")
        assert len(seen) == 8  # one more run only


def test_an_interrupted_labelling_goes_on(tmp_path):
    class Stop(Exception):
        pass

    def stop(done, total):
        if done >= 2:
            raise Stop

    def reply(n, body):
        time.sleep(0.3 * (n > 2))  # the others are still under way when two are done
        return 200, {}, json.dumps(GOOD)

    with server(reply) as (url, seen):
        attempts, path = [attempt(i) for i in range(5)], tmp_path / "replies.jsonl"
        with pytest.raises(Stop):
            endpoint.label(attempts, CAPABILITIES, config(url), path, on_progress=stop)
        kept = len(path.read_text().splitlines())
        assert 2 <= kept < 5
        path.write_text(path.read_text()[:-9])  # a crash in the middle of a line
        before = len(seen)
        labels, _ = endpoint.label(attempts, CAPABILITIES, config(url), path)
        assert len(seen) - before == 5 - (kept - 1) and (labels == [Label.PRESENT, Label.LACKING]).all()
        assert all(line.endswith("}") for line in path.read_text().splitlines()[kept:])


def test_a_busy_server_is_asked_again_after_the_time_it_names(tmp_path):
    replies = {1: (429, {"Retry-After": "7"}, None), 2: (503, {}, None)}
    waited = []
    with server(lambda n, body: replies.get(n, (200, {}, json.dumps(GOOD)))) as (url, seen):
        labels, unread = endpoint.label([attempt()], CAPABILITIES, config(url), tmp_path / "r", sleep=waited.append)
    assert waited == [7.0, 2.0] and len(seen) == 3 and unread == 0 and labels[0, 0, 0] == Label.PRESENT


@pytest.mark.parametrize(
    "bad", ["no idea", '{"first": "PRESENT"}', '{"first": "PRESENT", "second": "MAYBE"}', "[1]", None]
)
def test_an_unreadable_reply_is_asked_for_again_and_then_given_up(tmp_path, bad):
    with server(lambda n, body: (200, {}, bad if n == 1 else json.dumps(GOOD))) as (url, seen):
        labels, unread = endpoint.label([attempt()], CAPABILITIES, config(url), tmp_path / "a")
        assert unread == 0 and labels[0, 0, 1] == Label.LACKING
        assert seen[0]["body"]["seed"] != seen[1]["body"]["seed"]
    with server(lambda n, body: (200, {}, bad)) as (url, seen):
        labels, unread = endpoint.label([attempt()], CAPABILITIES, config(url), tmp_path / "b")
        assert unread == 1 and (labels == Label.NA).all() and len(seen) == 4
        assert not (tmp_path / "b").exists()  # it is asked for again next time


@pytest.mark.parametrize(("status", "part"), [(401, "MY_KEY"), (404, "capability.model"), (400, "capability.endpoint")])
def test_a_refusal_is_one_line_and_final(tmp_path, status, part):
    with server(lambda n, body: (status, {}, None)) as (url, seen), pytest.raises(ConfigError, match=part) as error:
        endpoint.label([attempt()], CAPABILITIES, config(url, key_variable="MY_KEY"), tmp_path / "r")
    assert len(seen) == 1 and "\n" not in str(error.value)


def test_a_server_that_is_not_there_or_too_slow_is_named(tmp_path):
    with server(lambda n, body: (200, {}, "")) as (url, _):
        pass  # its port is closed now
    waited = []
    told = pytest.warns(UserWarning, match="does not answer .*refused.*: up to 2 more tries")
    with told, pytest.raises(ConfigError, match="did not answer after 3 tries"):
        endpoint.label([attempt()], CAPABILITIES, config(url, retries=2), tmp_path / "r", sleep=waited.append)
    assert waited == [1.0, 2.0]
    gate = threading.Event()

    def stall(n, body):
        gate.wait(10)
        return 200, {}, json.dumps(GOOD)

    with server(stall) as (url, _):
        with pytest.raises(ConfigError, match="timed out"):
            slow = config(url, retries=0, timeout_seconds=0.2)
            endpoint.label([attempt()], CAPABILITIES, slow, tmp_path / "r")
        gate.set()
