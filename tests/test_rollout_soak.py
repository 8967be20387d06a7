"""Ten thousand short trajectories in a row through the real engine: nothing grows."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from helpers_collect import ToyEnvironment, open_files
from helpers_rollout import POLICY, STOP, VOCABULARY

from trace_jax.config import RolloutConfig
from trace_jax.environments.base import Task
from trace_jax.policy.chat import Turn
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.collect import collect
from trace_jax.rollout.engine import Engine

CONFIG = RolloutConfig(max_turns=3, max_turn_tokens=8, context=96, slots=128, tool_workers=4)
TASKS, GROUP, COLLECTIONS = 125, 4, 20


class Chat:
    """Two of three turns call the tool."""

    def encode_prompt(self, system, user):
        return np.random.default_rng(int(user)).integers(4, VOCABULARY, 20).tolist()

    def encode_observation(self, text):
        return [7, 8, 9]

    def parse_turn(self, ids):
        return Turn("call" if ids[0] % 3 else "answer", "x")


class Endless(ToyEnvironment):
    def task(self, index):
        return Task(index=index, system="", user=str(index), gold_answer="x")


def resident():
    """Bytes of memory of this process, where the system says (Linux); elsewhere nothing is compared."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


@pytest.mark.slow
def test_ten_thousand_trajectories_leave_nothing_behind():
    engine = Engine(Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(0)), CONFIG, STOP, lanes=1)
    environment, seen, statuses = Endless(), [], set()
    for step in range(COLLECTIONS):
        tasks = list(range(step * TASKS, (step + 1) * TASKS))
        done = collect(engine, Chat(), environment, tasks, group=GROUP, config=CONFIG, seed=0, step=step)
        statuses |= {t.status for t in done}
        seen.append((len(done), resident(), threading.active_count(), open_files()))
    assert sum(n for n, *_ in seen) == 10_000 and {"finished", "truncated"} <= statuses
    assert environment.opened == environment.closed
    half = seen[COLLECTIONS // 2 :]
    assert max(m for _, m, *_ in half) - half[0][1] < 40 * 2**20
    assert {threads for *_, threads, _ in half} == {half[0][2]} and {files for *_, files in half} == {half[0][3]}
    assert engine.compiled <= engine.compile_bound
    shared, prompts = engine.stats.shared_tokens, COLLECTIONS * TASKS * 19  # all but the last of 20 tokens
    assert shared == (GROUP - 1) * prompts
