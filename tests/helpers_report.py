"""Run directories for tests of the report: made from the files that a run writes, without training anything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from trace_jax import config_io
from trace_jax.config import EvaluationConfig, RunConfig, TokenizerConfig
from trace_jax.evaluation import metrics, store
from trace_jax.policy.chat import CONTROL, NanoChat
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.rollout import trajectory
from trace_jax.rollout.trajectory import Trajectory

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)> & http://example.com/x"
CAUSES = ("BID_INCREASE", "CREATIVE_FATIGUE", "NO_SIGNAL", "BUDGET_CAP")
TYPES = {"BID_INCREASE": "campaign", "BUDGET_CAP": "campaign", "CREATIVE_FATIGUE": "segment_1d"}
WORDS = (
    "select",
    "impressions",
    "clicks",
    "from",
    "segment_daily",
    "where",
    "geo",
    "US",
    "group",
    "by",
    "ctr",
    "spend",
)


def make_chat() -> NanoChat:
    """Turn format over a tokenizer that knows every byte."""
    texts = [" ".join(np.random.default_rng(i).permutation(WORDS)) for i in range(40)]
    texts += ["Find it.", "Why did it move?", HOSTILE, '{"root_cause": "BID_INCREASE"}'] * 3
    return NanoChat(SentencePieceTokenizer.train(texts, TokenizerConfig(vocab_size=420, fragments=0), list(CONTROL)))


def cause_of(task: int) -> str:
    return CAUSES[task % len(CAUSES)]


def labels_of(task: int) -> dict:
    cause = cause_of(task)
    driver = [["geo", "US"]] if cause == "CREATIVE_FATIGUE" else []
    return {"cause": cause, "type": TYPES.get(cause, "no_signal"), "driver": driver}


def attempt(
    chat: NanoChat, task: int, sample: int = 0, *, right: bool = True, steps=(("look()", "1 2 3"),), **fields
) -> Trajectory:
    """A trajectory that ends in a right answer, or in that of another cause."""
    cause = cause_of(task if right else task + 1)
    answer = json.dumps({"root_cause": cause})
    ids, mask, turn = chat.encode_transcript("Find it.", f"Why did it move? ({task})", list(steps), answer)
    drawn = np.random.default_rng([task, sample]).uniform(-2, 0, len(ids)).astype(np.float32)
    info = {"cause": cause, "driver": None, "parsed": True, "cause_right": right, "full_right": right}
    base = dict(
        versions=(0,) * (len(steps) + 1), status="finished", task_index=task, sample=sample, reward=float(right),
        rewards={"attr": float(right)}, tool_calls=len(steps), answer=answer, info=info, labels=labels_of(task),
    )  # fmt: skip
    return Trajectory(ids=ids, loss_mask=mask, logprobs=np.where(mask, drawn, 0), turn_index=turn, **base | fields)


def make_run(
    path: Path, chat: NanoChat, *, tasks: int = 12, samples: int = 2, wrong: int = 3, config: RunConfig | None = None
) -> Path:
    """A finished run: SFT and GRPO evaluated on `tasks` episodes, of which GRPO gets every `wrong`-th one wrong; one
    training step with turn credit; figures of both stages."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config_io.dump(config or RunConfig()))
    chat.tokenizer.save(path / "tokenizer.model")
    for agent, every in (("sft", 2), ("grpo", wrong)):
        rows = [
            attempt(chat, i, s, right=i % every != 0, steps=(("look()", HOSTILE), (f"{agent}({i})", f"row {i} of {s}")))
            for i in range(tasks)
            for s in range(samples)
        ]
        trajectory.write_parquet(path / "trajectories" / f"{agent}.parquet", rows)
        records = [metrics.record_of(t.task_index, t.sample, t.labels, t.info, t.tool_calls, t.status) for t in rows]
        store.save(path, agent, metrics.summarise(records, EvaluationConfig(bootstrap=50)), records)
    group = [attempt(chat, 3, s, right=s < 2, group=0, probes=(-2.0, -1.0)) for s in range(4)]
    trajectory.write_parquet(path / "trajectories" / "grpo-000004.parquet", group, 4)
    lines = [
        {"stage": "sft", "step": i, "seconds": 2.0 * i, "loss": 2.0 / i, "seconds/learn": 1.5} for i in range(1, 30)
    ]
    lines += [
        {"stage": "grpo", "step": i, "seconds": 60 + 10.0 * i, "reward": i / 10, "odd/figure": -i, "seconds/learn": 3.0,
         "seconds/wait": 5.0, "seconds/generate": 4.0}
        for i in range(1, 9)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path
