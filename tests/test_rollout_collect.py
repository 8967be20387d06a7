"""Collection with a scripted sampler: token in, token out; limits; tools that fail, hang or race."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from trace_jax.config import ConfigError, RolloutConfig
from trace_jax.environments.base import Observation, Reward, Task
from trace_jax.policy.chat import Turn
from trace_jax.rollout.collect import CollectStats, collect, metrics
from trace_jax.rollout.lane import SampledTurn
from trace_jax.rollout.sampling import Sampling
from trace_jax.rollout.workers import Call, WorkerPool

# Id 0 is both padding and end of turn (case 2). "ab" merges, so encode(decode(ids)) != ids (case 1).
PIECES = ["<|im_end|>", "a", "b", "ab", "x", "?", "!", "r"]
END, A, B, AB, X, ASK, DONE, RESULT = range(8)
CONFIG = RolloutConfig(max_turns=4, max_turn_tokens=8, context=64, slots=64, tool_workers=2, trajectory_seconds=20)


class ToyChat:
    """Greedy longest match over single characters and "ab"; unknown characters become "x"."""

    def encode(self, text):
        ids, i = [], 0
        while i < len(text):
            step = 2 if text[i : i + 2] == "ab" else 1
            piece = text[i : i + step]
            ids.append(PIECES.index(piece) if piece in PIECES else X)
            i += step
        return ids

    def encode_prompt(self, system, user):
        return [RESULT, *self.encode(system), END, *self.encode(user)]  # an id 0 inside the prompt

    def encode_observation(self, text):
        return [RESULT, *self.encode(text)]

    def parse_turn(self, ids):
        kind = {ASK: "call", DONE: "answer"}.get(ids[0], "malformed")
        return Turn(kind, "".join(PIECES[i] for i in ids[1:-1]))


class Script:
    """A sampler that replays scripts(row, turn) -> ids and records everything it is given."""

    version = 0

    def __init__(self, script):
        self.script = script
        self.begun = []

    def begin(self, prompts, seeds, sampling):
        self.begun.append(([np.array(p) for p in prompts], np.array(seeds), sampling))
        self.history = [list(p) for p in prompts]
        self.turn = 0

    def sample_turn(self, rows, limits):
        self.seen = {int(r): list(self.history[r]) for r in rows}
        out = []
        for r, limit in zip(rows, limits, strict=True):
            ids = list(self.script(int(r), self.turn))[:limit]
            self.history[r] += ids
            logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
            out.append(SampledTurn(np.array(ids, np.int32), logprobs, bool(ids) and ids[-1] == END))
        self.turn += 1
        self.version += 1
        return out

    def extend(self, rows, ids):
        for r, new in zip(rows, ids, strict=True):
            self.history[r] += list(new)


class ToyEnvironment:
    def __init__(self, step=lambda code, index, final: Observation("x")):
        self._step = step
        self.opened = self.closed = 0

    def __len__(self):
        return 9

    def task(self, index):
        return Task(index=index, system="a", user="b", gold_answer="a", labels={"cause": "A"})

    def open(self, task):
        self.opened += 1
        return ToyEpisode(self, task)


class ToyEpisode:
    def __init__(self, environment, task):
        self.environment, self.task = environment, task

    def step(self, action, *, final_turn=False):
        return self.environment._step(action, self.task.index, final_turn)

    def grade(self, answer):
        right = float(answer == self.task.gold_answer)
        return Reward(right, {"attr": right}, {"parsed": bool(answer)})

    def close(self):
        self.environment.closed += 1


def run(script, environment=None, tasks=(0,), group=1, config=CONFIG, **options):
    generator = Script(script)
    options = {"seed": 1, "step": 0} | options
    result = collect(
        generator, ToyChat(), environment or ToyEnvironment(), list(tasks), group=group, config=config, **options
    )
    return generator, result


def call_then_answer(row, turn):
    return [ASK, A, B, END] if turn == 0 else [DONE, A, END]


@pytest.mark.parametrize("output", ["x", "<|im_end|>"])
def test_ids_pass_through_untouched(output):
    """Case 1: the engine's second turn and the learner's row hold the sampled [a, b], though the text encodes to [ab];
    a tool output that spells the end-of-turn token is plain text."""
    codes = []

    def step(code, index, final):
        codes.append(code)
        return Observation(output)

    generator, (t,) = run(call_then_answer, ToyEnvironment(step))
    chat = ToyChat()
    assert codes == ["ab"] and chat.encode("ab") == [AB]  # re-encoding would drift
    prompt, observation = chat.encode_prompt("a", "b"), chat.encode_observation(output)
    assert END not in observation
    second = [*prompt, ASK, A, B, END, *observation]
    assert generator.seen[0] == second
    assert t.ids.tolist() == [*second, DONE, A, END]
    assert len(t.ids) == len(t.loss_mask) == len(t.logprobs) == len(t.turn_index)
    expected = [0] * len(prompt) + [1] * 4 + [0] * len(observation) + [1] * 3
    assert t.loss_mask.tolist() == expected and t.sampled_tokens == 7
    assert t.logprobs[t.loss_mask].tolist() == [-1, -2, -3, -4, -1, -2, -3] and (t.logprobs[~t.loss_mask] == 0).all()
    assert t.turn_index.tolist() == [-1] * len(prompt) + [0] * (4 + len(observation)) + [1] * 3
    assert (t.status, t.answer, t.reward, t.tool_calls, t.versions) == ("finished", "a", 1.0, 1, (0, 1))
    assert t.labels == {"cause": "A"} and t.info == {"parsed": True}


def test_masks_come_from_lengths_and_no_end_is_invented():
    """Case 2: pad == eos == 0. A row cut by the token limit keeps a mask on its last token and gets no end token."""
    config = dataclasses.replace(CONFIG, max_turn_tokens=3)
    _, (whole, cut) = run(lambda row, turn: [DONE, A, END] if row == 0 else [DONE, A, B, B], group=2, config=config)
    prompt = len(ToyChat().encode_prompt("a", "b"))
    assert whole.ids[prompt:].tolist() == [DONE, A, END] and cut.ids[prompt:].tolist() == [DONE, A, B]
    assert whole.loss_mask[prompt:].all() and cut.loss_mask[prompt:].all()
    assert not whole.loss_mask[:prompt].any() and 0 in whole.ids[:prompt]
    assert (whole.truncated, cut.truncated) == (False, True)
    assert metrics([whole, cut])["status/truncated"] == 0.5
    assert cut.reward == 0 and cut.answer is None and cut.rewards == {"attr": 0.0}


def test_malformed_turn_ends_with_reward_zero():
    _, (t,) = run(lambda row, turn: [A, B, END])
    assert (t.status, t.reward, t.answer, t.tool_calls) == ("malformed", 0.0, None, 0)


def test_last_turn_is_announced_and_a_call_in_it_truncates():
    finals = []

    def step(code, index, final):
        finals.append(final)
        return Observation("x")

    _, (t,) = run(lambda row, turn: [ASK, A, END], ToyEnvironment(step))
    assert finals == [False, False, True]
    assert (t.status, t.tool_calls, len(t.versions)) == ("truncated", 3, 4)


def test_context_limit_truncates_without_overrun():
    config = dataclasses.replace(CONFIG, context=16)
    _, (t,) = run(lambda row, turn: [ASK, A, END], ToyEnvironment(lambda *_: Observation("xxxx")), config=config)
    assert t.status == "truncated" and len(t) <= 16
    with pytest.raises(ConfigError, match="rollout.context"):
        run(call_then_answer, config=dataclasses.replace(CONFIG, context=4))


@pytest.mark.parametrize("kind", ["raises", "reports", "hangs", "open"])
def test_a_broken_tool_ends_only_its_own_trajectory(kind):
    release = threading.Event()

    def step(code, index, final):
        if index == 1:
            if kind == "raises":
                raise RuntimeError("worker died")
            if kind == "reports":
                return Observation("error: gone", error=True, status="tool_failure")
            if kind == "hangs":
                release.wait(20)
        return Observation("x")

    class Environment(ToyEnvironment):
        def open(self, task):
            if kind == "open" and task.index == 1:
                raise OSError("no memory")
            return super().open(task)

    environment = Environment(step)
    config = dataclasses.replace(CONFIG, trajectory_seconds=0.5 if kind == "hangs" else 20.0)
    start = time.monotonic()
    _, result = run(call_then_answer, environment, tasks=[0, 1, 2], group=2, config=config)
    assert time.monotonic() - start < 5
    expected = "timed_out" if kind == "hangs" else "tool_failure"
    assert [t.status for t in result] == ["finished"] * 2 + [expected] * 2 + ["finished"] * 2
    assert [t.reward for t in result] == [1, 1, 0, 0, 1, 1]
    assert all(t.loss_mask.sum() == 4 for t in result[2:4])  # the sampled call is kept, nothing is added to it
    release.set()
    deadline = time.monotonic() + 5
    while environment.closed < environment.opened and time.monotonic() < deadline:
        time.sleep(0.01)  # hung episodes are closed when their call returns
    assert environment.closed == environment.opened == (4 if kind == "open" else 6)


def test_errors_of_the_agents_code_are_observations():
    """An error or a time-out of one call is text that the agent reads."""
    for status in ("error", "timeout"):
        step = lambda *_, status=status: Observation("b", error=True, status=status)  # noqa: E731
        _, (t,) = run(call_then_answer, ToyEnvironment(step))
        assert t.status == "finished" and B in t.ids[~t.loss_mask].tolist()


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_order_does_not_depend_on_workers(workers):
    """Tools that return out of order, waves smaller than the batch: the same rows, the same seeds."""

    def step(code, index, final):
        time.sleep(0.003 * ((index * 7) % 5))
        return Observation("a" * index)

    config = dataclasses.replace(CONFIG, slots=4)
    generator, result = run(
        call_then_answer, ToyEnvironment(step), tasks=[3, 1, 2], group=3, config=config, workers=workers
    )
    assert [(t.task_index, t.group, t.sample) for t in result] == [
        (task, group, sample) for group, task in enumerate([3, 1, 2]) for sample in range(3)
    ]
    assert [(~t.loss_mask).sum() - len(ToyChat().encode_prompt("a", "b")) - 1 for t in result] == [3] * 3 + [1] * 3 + [
        2
    ] * 3
    assert [len(prompts) for prompts, _, _ in generator.begun] == [4, 4, 1]


def test_seeds_depend_on_run_step_task_and_sample_only():
    def seeds(tasks, **options):
        generator, _ = run(call_then_answer, tasks=tasks, group=2, **options)
        return generator.begun[0][1].tolist()

    assert seeds([0, 1])[2:] == seeds([1])  # not on the other tasks of the batch
    assert len(set(seeds([0, 1, 0]))) == 6  # a task that is named twice is sampled anew
    assert seeds([0]) != seeds([0], seed=2) and seeds([0]) != seeds([0], step=1)
    assert seeds([0]) == seeds([ToyEnvironment().task(0)])


def test_logprobs_of_other_samplers_are_withheld():
    """Case 4: what the learner cannot reproduce never looks like a behaviour log-probability."""
    for sampling in (Sampling(0.0), Sampling(1.0, top_k=2)):
        generator, (t,) = run(call_then_answer, sampling=sampling)
        assert generator.begun[0][2] == sampling
        assert np.isnan(t.logprobs[t.loss_mask]).all() and (t.logprobs[~t.loss_mask] == 0).all()
        with pytest.raises(ConfigError):
            t.behaviour_logprobs()


def test_stats_and_progress():
    stats, heard = CollectStats(), []
    _, result = run(call_then_answer, group=3, stats=stats, progress=lambda done, total: heard.append((done, total)))
    assert heard[-1] == (3, 3)
    summary = metrics(result, stats)
    assert summary["tool_calls"] == 1 and summary["sampled_tokens"] == 21 and summary["status/finished"] == 1
    assert 0 <= summary["seconds/tools"] <= summary["seconds/total"]


def test_stalled_calls_give_up_their_place(monkeypatch):
    """Two stuck calls on two workers do not hold up the third."""
    monkeypatch.setattr("trace_jax.rollout.workers.STALL_SECONDS", 0.05)
    release = threading.Event()
    calls = [Call(lambda: release.wait(5), 0.6, lambda: None) for _ in range(2)]
    quick = Call(lambda: "done", 0.6, lambda: None)
    with WorkerPool(2) as pool:
        pool.run([*calls, quick])
    release.set()
    assert quick.value == "done" and quick.seconds < 0.3
    assert all(call.abandoned and call.seconds >= 0.6 for call in calls)
