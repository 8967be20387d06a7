"""Prompted models against a small server that calls, answers, stalls, refuses, mumbles and is cut off."""

import json
import threading
from types import SimpleNamespace

import pytest
from helpers_endpoint import call, completion, say, serving
from helpers_episodes import fake_set

from trace_jax.config import ConfigError, EndpointConfig, EnvironmentConfig, EvaluationConfig, RunConfig
from trace_jax.environments.ads.answer import format_answer
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.evaluation import client
from trace_jax.evaluation.prompted import Prompted
from trace_jax.recipes import assess, prompted
from trace_jax.recipes.workspace import Workspace

QUERY = 'sql("select count(*) n from segment_daily")'
ANSWER = format_answer("BUDGET_CAP", (), ["volume"], "less")  # right of episode 2 alone


@pytest.fixture(scope="module")
def environment():
    return AdsEnvironment(fake_set(3), EnvironmentConfig(prompt="full"))


def agent(url, **fields):
    settings = EndpointConfig(url=url, model="m", **({"retries": 2, "timeout_seconds": 5.0} | fields))
    return Prompted(settings, EvaluationConfig(), sleep=lambda seconds: None)


def turns(body):
    """Assistant turns so far."""
    return sum(m["role"] == "assistant" for m in body["messages"])


def once_then_answer(number, body):
    return call(QUERY) if turns(body) == 0 else say(ANSWER)


def test_a_conversation_with_the_tool(environment):
    with serving(once_then_answer) as (url, seen):
        talk = agent(url).attend(environment, 2, 0)
        wrong = agent(url).attend(environment, 0, 1)
    assert talk.status == "finished" and talk.tool_calls == 1 and talk.info["full_right"] and talk.info["exact_parsed"]
    assert wrong.status == "finished" and not wrong.info["cause_right"]
    first, second = seen[:2]
    assert first["model"] == "m" and first["temperature"] == 0.6 and first["max_tokens"] == 2048
    assert first["tools"][0]["function"]["name"] == "python"
    assert first["messages"][0]["content"] == environment.task(2).system and "DuckDB" in first["messages"][0]["content"]
    asked, told = second["messages"][2:]
    assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == {"code": QUERY}
    rows = environment.open(environment.task(2)).step(QUERY).text
    assert told == {"role": "tool", "tool_call_id": "c1", "content": rows}
    assert (talk.usage.requests, talk.usage.tokens_in, talk.usage.tokens_out) == (2, 200, 20)
    assert len({body["seed"] for body in seen}) == 4  # every turn of every sample draws anew


def test_the_same_attempt_asks_the_same(environment):
    with serving(once_then_answer) as (url, seen):
        for _ in range(2):
            agent(url).attend(environment, 1, 3)
    assert seen[:2] == seen[2:]


def test_calls_in_text(environment):
    """Without `tools`: a fenced block is a call, its output the next message, anything else the answer."""

    def reply(number, body):
        return say(f"Let me look.\n```python\n{QUERY}\n```") if turns(body) == 0 else say(f"So:\n{ANSWER}")

    with serving(reply) as (url, seen):
        talk = agent(url, protocol="text").attend(environment, 2, 0)
    assert talk.tool_calls == 1 and talk.info["full_right"] and not talk.info["exact_parsed"]
    assert "tools" not in seen[0] and "fenced block" in seen[0]["messages"][0]["content"]
    assert seen[1]["messages"][3]["role"] == "user"


def test_turns_are_limited_and_the_last_is_announced(environment):
    with serving(lambda number, body: call(QUERY)) as (url, seen):
        talk = agent(url, max_turns=3).attend(environment, 0, 0)
    assert talk.status == "truncated" and len(seen) == 3 and talk.tool_calls == 2 and talk.info == {}
    told = [m["content"] for m in seen[-1]["messages"] if m["role"] == "tool"]
    assert "last tool call" in told[1] and "last tool call" not in told[0]


@pytest.mark.parametrize(
    "reply",
    [
        (200, {}, json.dumps(completion(say("{"), finish="length"))),
        (200, {}, json.dumps(completion(call(QUERY), used=(32000, 800)))),
        (400, {}, '{"error": {"code": "context_length_exceeded"}}'),
    ],
)
def test_what_does_not_fit_is_truncated(environment, reply):
    with serving(lambda number, body: reply) as (url, seen):
        talk = agent(url).attend(environment, 0, 0)
    assert talk.status == "truncated" and talk.answer is None and len(seen) == 1


@pytest.mark.parametrize("bad", ["!no json", '!{"query": 1}', "![]", '!{"code": 3}'])
def test_a_call_that_cannot_be_read_is_told_so(environment, bad):
    with serving(lambda number, body: call(bad) if turns(body) == 0 else say(ANSWER)) as (url, seen):
        talk = agent(url).attend(environment, 2, 0)
    assert talk.status == "finished" and talk.info["full_right"]
    assert seen[1]["messages"][3]["content"].startswith("error: call the tool")


@pytest.mark.parametrize("message", [{"content": None}, {"content": ""}, {"content": None, "tool_calls": []}])
def test_an_empty_reply_is_malformed(environment, message):
    with serving(lambda number, body: {"role": "assistant", **message}) as (url, _):
        talk = agent(url).attend(environment, 0, 0)
    assert talk.status == "malformed" and talk.answer is None


@pytest.mark.parametrize("raw", ["oops", "{}", '{"choices": []}', '{"choices": [{"message": {"content": 3}}]}'])
def test_a_reply_that_is_none_is_asked_for_again(environment, raw):
    with serving(lambda number, body: (200, {}, raw) if number < 3 else say(ANSWER)) as (url, seen):
        assert agent(url).attend(environment, 2, 0).info["full_right"]
    assert len(seen) == 3 and len({body["seed"] for body in seen}) == 3
    with serving(lambda number, body: (200, {}, raw)) as (url, seen):
        assert agent(url).attend(environment, 2, 0).status == "malformed"
    assert len(seen) == 3


def test_a_busy_server_holds_all_threads_back():
    """429 with Retry-After: the thread that was told waits once; another, on the same clock, waits for the rest."""
    now, slept = [100.0], []
    server = client.Server("http://127.0.0.1:1/v1", "NO_KEY", 1.0, 3, "endpoint", "url", "episodes")
    asking = client.Client(server, sleep=slept.append, clock=lambda: now[0])
    until = asking._pause(0, 20.0)
    asking._wait_until_open(until)
    now[0] += 5
    asking._wait_until_open(-1.0)
    assert slept == [20.0, 15.0]
    asking.closing.set()
    with pytest.raises(client.Closed):
        asking._wait_until_open(-1.0)


def test_retry_after_may_be_a_date():
    assert (
        client.asked_to_wait("7") == 7.0 and client.asked_to_wait("soon") is None and client.asked_to_wait(None) is None
    )
    assert client.asked_to_wait("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert client.asked_to_wait("Wed, 21 Oct 2099 07:28:00 GMT") > 1e9


def test_slow_and_busy_servers_are_asked_again(environment):
    gate, waited = threading.Event(), []

    def reply(number, body):
        if number == 1:
            gate.wait(10)  # longer than the client does
        return (429, {"Retry-After": "3"}, "") if number == 2 else say(ANSWER)

    with serving(reply) as (url, seen):
        slow = Prompted(
            EndpointConfig(url=url, model="m", timeout_seconds=0.3), EvaluationConfig(), sleep=waited.append
        )
        assert slow.attend(environment, 2, 0).info["full_right"]
        gate.set()
    assert len(seen) == 3 and waited == [1.0, 3.0]


# The recipe: files, interrupts, costs.


def work(tmp_path, url, **evaluation):
    settings = EndpointConfig(url=url, model="org/m", retries=0, workers=1, price_in=2.0, price_out=10.0)
    config = RunConfig(endpoint=settings, evaluation=EvaluationConfig(**({"samples": 2, "bootstrap": 50} | evaluation)))
    run = SimpleNamespace(folder=lambda name: tmp_path / name, path=tmp_path)
    return SimpleNamespace(config=config, run=run, progress=SimpleNamespace(note=lambda text: None))


def quiet(done, total):
    pass


def test_an_interrupted_evaluation_goes_on(tmp_path, environment):
    class Stop(Exception):
        pass

    def stop(done, total):
        if done == 1:
            raise Stop

    path = tmp_path / "trajectories" / "x.jsonl"
    with serving(once_then_answer) as (url, seen):
        with pytest.raises(Stop):
            prompted.evaluate(work(tmp_path, url), environment, "x", stop)
        kept = len(path.read_text().splitlines())
        assert 2 <= kept < 6
        path.write_text(path.read_text()[:-20])  # a crash in the middle of a line
        before = len(seen)
        records, usage = prompted.evaluate(work(tmp_path, url), environment, "x", quiet)
        assert len(seen) - before == 2 * (6 - (kept - 1))
        assert [(r.index, r.sample) for r in records] == [(i, s) for i in range(3) for s in range(2)]
        assert [r.full_right for r in records] == [False] * 4 + [True] * 2
        again, same = prompted.evaluate(work(tmp_path, url), environment, "x", quiet)
        assert again == records and same == usage and len(seen) - before == 2 * (6 - (kept - 1))
        assert usage["requests"] == 12 and usage["cost"] == pytest.approx((1200 * 2 + 120 * 10) / 1e6)
        more, _ = prompted.evaluate(work(tmp_path, url, samples=3), environment, "x", quiet)  # only the third ones
        assert len(more) == 9 and len(seen) - before == 2 * (6 - (kept - 1)) + 6
        asked = len(seen)
        prompted.evaluate(work(tmp_path, url, temperature=0.1), environment, "x", quiet)  # another question
        assert len(seen) - asked == 12


def test_a_refusal_keeps_what_has_ended(tmp_path, environment, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    def reply(number, body):
        return once_then_answer(number, body) if number <= 4 else (401, {}, "no")

    with serving(reply) as (url, _), pytest.raises(ConfigError, match="OPENAI_API_KEY") as error:
        prompted.evaluate(work(tmp_path, url), environment, "x", quiet)
    assert "\n" not in str(error.value) and "secret" not in str(error.value)
    assert len((tmp_path / "trajectories" / "x.jsonl").read_text().splitlines()) == 2


def test_the_command(tmp_path, environment, monkeypatch, capsys):
    """A directory of its own, results under the model's name, the table, and the same numbers the second time."""
    seen_styles = []

    def fake(self, split):
        seen_styles.append(self.config.environment.prompt)
        return environment

    monkeypatch.setattr(Workspace, "environment", fake)
    with serving(once_then_answer) as (url, seen):
        config = work(tmp_path, url).config
        for _ in range(2):
            result = assess.command(tmp_path / "run", config, agent="endpoint", split="test")
    assert len(seen) == 12 and seen_styles == ["full", "full"]
    assert result["full_attr_at_1"]["value"] == pytest.approx(1 / 3) and result["tool_calls"]["value"] == 1
    assert result["benchmark"]["episodes"] == 3 and result["extra"]["usage"]["tokens_out"] == 120
    assert (tmp_path / "run" / "evaluation" / "endpoint-org_m.json").exists()
    printed = capsys.readouterr().out
    assert "endpoint-org_m" in printed and "cost 0.0036" in printed and "sha256" in printed
    with pytest.raises(ConfigError, match="--agent endpoint"):
        assess.command(tmp_path / "run", config, agent="scan", split="test")
    with pytest.raises(ConfigError, match="--model"):
        assess.command(None, RunConfig(endpoint=EndpointConfig(url=url)), agent="endpoint", split="test")
