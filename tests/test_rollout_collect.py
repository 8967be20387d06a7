"""Collection with a scripted sampler: token in, token out; limits; the same rows whatever the order of events."""

import dataclasses
import random
import threading

import numpy as np
import pytest
from helpers_collect import (
    AB,
    ASK,
    CONFIG,
    DONE,
    END,
    A,
    B,
    Script,
    Shuffled,
    ToyChat,
    ToyEnvironment,
    X,
    call_then_answer,
    eventually,
    rollout_threads,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import ConfigError
from trace_jax.environments.base import Observation
from trace_jax.rollout.collect import CollectStats, metrics
from trace_jax.rollout.generator import SampledTurn
from trace_jax.rollout.sampling import Sampling
from trace_jax.rollout.trajectory import read_parquet, to_table, write_parquet


@pytest.mark.parametrize("output", ["x", "<|im_end|>", "", "größer 三 \U0001f600"])
def test_ids_pass_through_untouched(output):
    """Case 1: the engine's second turn and the learner's row hold the sampled [a, b], though the text encodes to [ab];
    a tool output that spells the end-of-turn token is plain text; an empty one is an observation all the same."""
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
    assert (t.status, t.answer, t.reward, t.tool_calls) == ("finished", "a", 1.0, 1)
    assert t.labels == {"cause": "A"} and t.info == {"parsed": True} and t.kept is None


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


@pytest.mark.parametrize("context", [12, 16, 20])  # 12 and 20: an observation fills it to the last token
def test_context_limit_truncates_without_overrun(context):
    config = dataclasses.replace(CONFIG, context=context)
    environment = ToyEnvironment(lambda *_: Observation("xxxx"))
    generator, (t,) = run(lambda row, turn: [ASK, A, END], environment, config=config)
    assert t.status == "truncated" and len(t) <= context
    assert all(len(generator.seen[row]) + generator.limits[row] <= context for row in generator.seen)
    with pytest.raises(ConfigError, match="rollout.context"):
        run(call_then_answer, config=dataclasses.replace(CONFIG, context=4))


def test_a_megabyte_of_output_truncates_its_row_only():
    step = lambda code, index, final: Observation("a" * 2**20 if index == 1 else "x")  # noqa: E731
    _, result = run(call_then_answer, ToyEnvironment(step), tasks=[0, 1, 2])
    assert [t.status for t in result] == ["finished", "truncated", "finished"]
    assert len(result[1]) == len(ToyChat().encode_prompt("a", "b")) + 4 and result[1].loss_mask[-4:].all()


def test_errors_of_the_agents_code_are_observations():
    """An error or a time-out of one call is text that the agent reads."""
    for status in ("error", "timeout"):
        stats = CollectStats()
        step = lambda *_, status=status: Observation("b", error=True, status=status)  # noqa: E731
        _, (t,) = run(call_then_answer, ToyEnvironment(step), stats=stats)
        assert t.status == "finished" and B in t.ids[~t.loss_mask].tolist()
        assert (stats.calls, stats.errors, stats.timeouts) == (1, status == "error", status == "timeout")


def _said(seed, history):
    """What a made-up policy says, a function of the row's seed and all that it has seen."""
    draw = random.Random(f"{seed} {history}")
    kind = draw.choices(["call", "answer", "malformed", "long"], [6, 3, 1, 1])[0]
    body = draw.choices([A, B, X, AB], k=draw.randrange(4))
    return {
        "call": [ASK, *body, END],
        "answer": [DONE, *body, END],
        "malformed": [*body, X, END],
        "long": [ASK, *[A] * 20],
    }[kind]


def _observed(code, index, final):
    return Observation(code[::-1] + "b" * (index % 3) + ("!" if final else ""))


def _alone(seed, index):
    """The trajectory that one row should become, worked out without threads: (ids, mask, status, answer, calls)."""
    chat = ToyChat()
    ids = chat.encode_prompt("a", "b")
    mask, calls = [False] * len(ids), 0
    for turn in range(CONFIG.max_turns):
        limit = min(CONFIG.max_turn_tokens, CONFIG.context - len(ids))
        said = _said(seed, ids)[:limit]
        ids, mask = ids + said, mask + [True] * len(said)
        if said[-1] != END:
            return ids, mask, "truncated", None, calls
        parsed = chat.parse_turn(said)
        if parsed.kind != "call":
            finished = parsed.kind == "answer"
            return ids, mask, "finished" if finished else "malformed", parsed.text if finished else None, calls
        if turn + 1 == CONFIG.max_turns:
            return ids, mask, "truncated", None, calls
        calls = turn + 1
        seen = chat.encode_observation(_observed(parsed.text, index, turn + 2 == CONFIG.max_turns).text)
        if len(ids) + len(seen) >= CONFIG.context:
            return ids, mask, "truncated", None, calls
        ids, mask = ids + seen, mask + [False] * len(seen)
    raise AssertionError


class _Speaker(Shuffled):
    """`_said` in an order of its own."""

    def __init__(self, slots, rng):
        super().__init__(lambda row, turn: _said(self.seeds[row], self.seen[row]), slots, rng, delay=0.001)


@settings(max_examples=25, deadline=None)
@given(order=st.integers(0, 2**32), slots=st.integers(1, 9), workers=st.integers(1, 5), sleepy=st.booleans())
def test_trajectories_do_not_depend_on_the_order_of_events(order, slots, workers, sleepy):
    """Turns and tools that return in any order, any number of slots and workers: every row is what it is alone, and
    rows come back in the order of tasks and samples."""
    rng, pause = random.Random(order), threading.Event()

    def step(code, index, final):
        if sleepy:
            pause.wait(rng.random() * 0.003)
        return _observed(code, index, final)

    tasks, environment = [3, 1, 2, 1], ToyEnvironment(step)
    generator = _Speaker(slots, rng)
    generator, result = run(generator, environment, tasks=tasks, group=3, workers=workers)
    assert [(t.task_index, t.group, t.sample) for t in result] == [(tasks[g], g, k) for g in range(4) for k in range(3)]
    for row, t in enumerate(result):
        ids, mask, status, answer, calls = _alone(generator.seeds[row], t.task_index)
        assert (t.ids.tolist(), t.loss_mask.tolist()) == (ids, mask)
        assert (t.status, t.answer, t.tool_calls) == (status, answer, calls)
        assert t.versions == tuple(range(len(t.versions))) and t.stale == (False,) * len(t.versions)
    assert generator.started == list(range(12)) and sorted(generator.released) == generator.started
    assert generator.most_held == min(slots, 12) and generator.ended == 1
    assert environment.opened == environment.closed and environment.most_open <= slots + 8
    assert rollout_threads() == []


def test_a_slow_row_at_the_sampler_stalls_nobody():
    """The first row's turn comes only when every other row is over: the one remaining slot takes them in order."""

    class Slow(Script):
        def release(self, row):
            super().release(row)
            if len(self.released) == 7:
                self.release_turn(0, [DONE, A, END])

    script = lambda row, turn: None if row == 0 else call_then_answer(row, turn)  # noqa: E731
    generator, result = run(Slow(script, slots=2), tasks=range(8))
    assert [t.status for t in result] == ["finished"] * 8
    assert generator.released == [1, 2, 3, 4, 5, 6, 7, 0]


def test_a_slow_tool_stalls_nobody():
    """The first row's tool returns only when every other row is over, with one worker beside it."""
    others_over = threading.Event()

    class Watching(Script):
        def release(self, row):
            super().release(row)
            if len(self.released) == 7:
                others_over.set()

    step = lambda code, index, final: Observation("x" if index or others_over.wait(15) else "b")  # noqa: E731
    generator, result = run(Watching(call_then_answer, slots=2), ToyEnvironment(step), tasks=range(8), workers=2)
    assert [t.status for t in result] == ["finished"] * 8 and B not in result[0].ids[~result[0].loss_mask][-2:]
    assert generator.released[-1] == 0


def test_tools_run_while_rows_are_sampled():
    """The turn of one row comes only while the tool of the other runs, and that one ends only after the turn came."""
    in_tool, turn_came = threading.Event(), threading.Event()

    def step(code, index, final):
        in_tool.set()
        return Observation("x" if turn_came.wait(15) else "b")

    class Overlapping(Script):
        def asked(self, row):
            if row == 0:
                super().asked(row)
            else:
                threading.Thread(target=self._later, args=(row,)).start()

        def _later(self, row):
            assert in_tool.wait(15)
            self.release_turn(row, [DONE, A, END])

        def release(self, row):
            super().release(row)
            if row == 1:
                turn_came.set()

    stats = CollectStats()
    generator, result = run(Overlapping(call_then_answer), ToyEnvironment(step), group=2, stats=stats)
    assert [t.status for t in result] == ["finished"] * 2 and generator.released == [1, 0]
    assert B not in result[0].ids[~result[0].loss_mask][-2:]
    assert 0 < stats.tools_alone < stats.tools and stats.sampling <= stats.total


def test_a_group_keeps_its_database_when_slots_are_few():
    """With one slot, a row's successor is opened before the row ends, so that what a group shares is not lost."""
    created, users = [], {4: 0, 5: 0}

    class Sharing(ToyEnvironment):
        def open(self, task):
            episode = super().open(task)
            if not users[task.index]:
                created.append(task.index)
            users[task.index] += 1
            close = episode.close

            def closing():
                users[task.index] -= 1
                close()

            episode.close = closing
            return episode

    def step(code, index, final):
        assert eventually(lambda: environment.opened > min(len(generator.started), 7), 2)
        return Observation("x")

    generator, environment = Script(call_then_answer, slots=1), Sharing(step)
    _, result = run(generator, environment, tasks=[4, 5], group=4)
    assert created == [4, 5] and {t.status for t in result} == {"finished"}


def test_seeds_depend_on_run_step_task_and_sample_only():
    def seeds(tasks, **options):
        generator, _ = run(call_then_answer, tasks=tasks, group=2, **options)
        return [generator.seeds[row] for row in range(2 * len(tasks))]

    assert seeds([0, 1])[2:] == seeds([1])  # not on the other tasks of the batch
    assert len(set(seeds([0, 1, 0]))) == 6  # a task that is named twice is sampled anew
    assert seeds([0]) != seeds([0], seed=2) and seeds([0]) != seeds([0], step=1)
    assert seeds([0]) == seeds([ToyEnvironment().task(0)])
    assert seeds([7]) == [5247959300585288059, 3856622250133589281]  # as in earlier versions: resumed runs


def test_logprobs_of_other_samplers_are_withheld():
    """Case 4: what the learner cannot reproduce never looks like a behaviour log-probability."""
    for sampling in (Sampling(0.0), Sampling(1.0, 0, 0.9)):
        generator, (t,) = run(call_then_answer, sampling=sampling)
        assert generator.begun == [sampling]
        assert np.isnan(t.logprobs[t.loss_mask]).all() and (t.logprobs[~t.loss_mask] == 0).all()
        with pytest.raises(ConfigError):
            t.behaviour_logprobs()
    config = dataclasses.replace(CONFIG, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    generator, (t,) = run(call_then_answer, config=config)
    assert generator.begun == [Sampling(0.7, 5, 0.9, 0.1)] and not np.isnan(t.logprobs).any()


def test_versions_stale_turns_and_kept_sets_arrive(tmp_path):
    """Each turn has the version that its sampler says, the oldest counts; what was left of a truncated distribution
    stands beside the sampled ids and nowhere else."""

    class Telling(Script):
        def release_turn(self, row, ids):
            deliver, kept = self.deliver, np.array([[i, -1] for i in ids], np.int32)
            self.deliver = lambda turn: deliver(
                dataclasses.replace(turn, version=9 - turn.version, stale=self.turns[row] == 2, kept=kept)
            )
            super().release_turn(row, ids)
            self.deliver = deliver

    _, (t,) = run(Telling(call_then_answer), sampling=Sampling(1.0, 2))
    assert t.versions == (9, 8) and t.oldest_version == 8 and t.stale == (False, True)
    assert t.kept.shape == (len(t), 2) and (t.kept[~t.loss_mask] == -1).all()
    assert (t.kept[t.loss_mask, 0] == t.ids[t.loss_mask]).all() and (t.kept[:, 1] == -1).all()
    assert metrics([t])["stale_turns"] == 0.5
    write_parquet(tmp_path / "x.parquet", [t])
    assert read_parquet(tmp_path / "x.parquet")[0].stale == (False, True)
    assert to_table([t]).column("stale").to_pylist() == [[False, True]]
    with pytest.raises(ValueError, match="stale"):
        dataclasses.replace(t, stale=(True,))


def test_stats_and_progress():
    stats, heard = CollectStats(), []
    _, result = run(call_then_answer, group=3, stats=stats, progress=lambda done, total: heard.append((done, total)))
    assert heard[-1] == (3, 3) and heard == sorted(heard) and heard[0][0] == 0
    summary = metrics(result, stats)
    assert summary["tool_calls"] == 1 and summary["sampled_tokens"] == 21 and summary["status/finished"] == 1
    assert 0 <= summary["seconds/tools"] <= summary["seconds/total"] and summary["tools/calls"] == 3
    assert summary["tools/queue_seconds_mean"] <= summary["tools/queue_seconds_max"]


def test_progress_is_called_while_nothing_ends(monkeypatch):
    """So that Ctrl-C is heard during a long turn."""
    monkeypatch.setattr("trace_jax.rollout.collect.TICK_SECONDS", 0.01)
    generator = Script(lambda row, turn: None)
    heard = []

    def progress(ended, total):
        heard.append(ended)
        if len(heard) == 5:
            generator.release_turn(0, [DONE, A, END])

    run(generator, progress=progress)
    assert heard[:5] == [0] * 5 and heard[-1] == 1


def test_no_tasks_give_no_trajectories():
    generator, result = run(call_then_answer, tasks=[])
    assert result == [] and generator.ended == 1 and rollout_threads() == []


def test_a_sampler_that_breaks_the_protocol_is_named():
    """A turn that nobody asked for would be taken for the answer to the next one."""

    class Twice(Script):
        def release_turn(self, row, ids):
            super().release_turn(row, ids)
            self.deliver(SampledTurn(row, np.array(ids), np.zeros(len(ids)), True, 0))

    step = lambda *_: (threading.Event().wait(0.2), Observation("x"))[1]  # noqa: E731
    with pytest.raises(RuntimeError, match="row 0"):
        run(Twice(call_then_answer), ToyEnvironment(step))
