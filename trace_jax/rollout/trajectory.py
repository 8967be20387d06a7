"""Trajectories: what a policy sampled, exactly as it was sampled, and how it was graded.

Ids are never re-encoded from text ("token in, token out"): the row that the learner sees is the row that the engine
saw. Axis letters: N tokens of one trajectory, k ids that a truncated sampler left (`Sampling.top_k`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float32, Int16, Int32

from trace_jax.config import ConfigError

STATUSES = ("finished", "truncated", "timed_out", "tool_failure", "malformed")
"""How a trajectory ended.

finished: an answer was given. truncated: a turn hit its token limit before its stop token, the context filled up, or
the last turn was still a tool call. timed_out: the wall-clock limit ran out, or a tool call waited too long for a
worker. tool_failure: the tool itself broke (errors of the agent's code are observations, not failures). malformed: a
turn was neither a tool call nor an answer.
"""

PROMPT_TURN = -1


@dataclass(frozen=True)
class Trajectory:
    """One episode as the policy lived it.

    Attributes:
      ids: prompt, then alternately sampled turns and observations, in order.
      loss_mask: true exactly on sampled ids (the stop token that ends a turn is sampled, so it is included).
      logprobs: log-probability of each sampled id under the tempered distribution it was drawn from; 0 where
        `loss_mask` is false; NaN on sampled ids of a greedy trajectory, which has no behaviour distribution.
      turn_index: assistant turn that a token belongs to; an observation carries the turn whose call it answers, the
        prompt carries -1.
      versions: policy version of each assistant turn, the oldest that drew one of its tokens.
      rewards: parts of the reward by name; reward: their weighted total. 0 unless `status` is "finished".
      task_index: task in the environment. group: ordinal of the prompt group in its collection. sample: ordinal in the
        group.
      tool_calls: calls that were made (answered or not). answer: text of the final answer, None when there is none.
      info: what grading found (JSON-able). labels: the task's labels, for grouping metrics (JSON-able).
      stale: whether a turn attended to keys and values of older parameters than those that drew it, so that no single
        version of the policy reproduces its log-probabilities; empty where nobody recorded it.
      probes: mean log-probability that a frozen reference gives to the gold answer before the first tool turn and after
        each of them (`learner.turn_credit`); empty where nobody asked.
      kept: ids that could have been drawn for each sampled id, itself included, -1 where fewer than k; -1 where
        `loss_mask` is false; None when nothing was left out.
      experts: those that each token had in each layer when it was fed (`rollout.replay_routes`), -1 where it was not;
        None when nobody recorded them.
    """

    ids: Int32[np.ndarray, " N"]
    loss_mask: Bool[np.ndarray, " N"]
    logprobs: Float32[np.ndarray, " N"]
    turn_index: Int32[np.ndarray, " N"]
    versions: tuple[int, ...]
    status: str
    task_index: int
    group: int = 0
    sample: int = 0
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    tool_calls: int = 0
    answer: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    stale: tuple[bool, ...] = ()
    probes: tuple[float, ...] = ()
    kept: Int32[np.ndarray, "N k"] | None = None
    experts: Int16[np.ndarray, "N L e"] | None = None

    def __post_init__(self):
        lengths = {len(self.ids), len(self.loss_mask), len(self.logprobs), len(self.turn_index)}
        lengths |= {len(self.ids if x is None else x) for x in (self.kept, self.experts)}
        if len(lengths) != 1:
            raise ValueError(f"token streams of a trajectory differ in length: {sorted(lengths)}")
        if self.stale and len(self.stale) != len(self.versions):
            raise ValueError(f"{len(self.versions)} turns, but {len(self.stale)} of them are said to be stale or not")
        if self.status not in STATUSES:
            raise ValueError(f"unknown status {self.status!r}, expected one of {STATUSES}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def truncated(self) -> bool:
        """Whether a limit cut the trajectory off before its answer."""
        return self.status == "truncated"

    @property
    def sampled_tokens(self) -> int:
        """Number of ids that the policy chose."""
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int:
        """Policy version of the stalest turn (-1 without a turn)."""
        return min(self.versions, default=-1)

    def behaviour_logprobs(self) -> Float32[np.ndarray, " N"]:
        """`logprobs`, for a learner that needs the behaviour policy.

        Raises:
          ConfigError: the trajectory was sampled greedily or from a truncated distribution that was not recorded, so
            that no importance ratio is defined.
        """
        if np.isnan(self.logprobs).any():
            raise ConfigError(
                "trajectory sampled greedily, or truncated without a top_k, has no behaviour log-probabilities; train "
                "on rollout.temperature > 0 and, with top_p or min_p, rollout.top_k > 0"
            )
        return self.logprobs


_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("task_index", pa.int64()),
        ("group", pa.int32()),
        ("sample", pa.int32()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.string()),
        ("tool_calls", pa.int32()),
        ("answer", pa.string()),
        ("info", pa.string()),
        ("labels", pa.string()),
        ("versions", pa.list_(pa.int64())),
        ("ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("turn_index", pa.list_(pa.int32())),
        ("stale", pa.list_(pa.bool_())),
        ("probes", pa.list_(pa.float64())),
        ("kept", pa.list_(pa.int32())),  # k ids for the first token, then for the second, ...
        ("experts", pa.list_(pa.int16())),  # of the first token layer by layer, then of the second, ...
        ("expert_layers", pa.int32()),
    ]
)
_REPLAYED = ("kept", "experts", "expert_layers")
_PART = 64  # rows
_LATER = ("stale", "kept", "probes", "experts", "expert_layers")  # columns that files of earlier versions lack


def _jsonable(value: Any) -> Any:
    """NumPy scalars and arrays, sets and tuples as JSON knows them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"cannot store {type(value).__name__} in a trajectory file")


def stored(value: dict[str, Any]) -> dict[str, Any]:
    """Labels or info as they come back from a file."""
    return json.loads(json.dumps(value, default=_jsonable))


def to_table(trajectories: Iterable[Trajectory], step: int = 0) -> pa.Table:
    """Trajectories as Arrow rows (dict fields as JSON text), labelled with the training step."""
    rows = []
    for t in trajectories:
        rows.append(
            {
                "step": step,
                "task_index": t.task_index,
                "group": t.group,
                "sample": t.sample,
                "status": t.status,
                "reward": t.reward,
                "rewards": json.dumps(t.rewards, default=_jsonable),
                "tool_calls": t.tool_calls,
                "answer": t.answer,
                "info": json.dumps(t.info, default=_jsonable),
                "labels": json.dumps(t.labels, default=_jsonable),
                "versions": list(t.versions),
                "ids": t.ids,
                "loss_mask": t.loss_mask,
                "logprobs": t.logprobs,
                "turn_index": t.turn_index,
                "stale": list(t.stale),
                "probes": list(t.probes),
                "kept": None if t.kept is None else t.kept.reshape(-1),
                "experts": None if t.experts is None else t.experts.reshape(-1),
                "expert_layers": None if t.experts is None else t.experts.shape[1],
            }
        )
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def from_table(table: pa.Table) -> list[Trajectory]:
    """Inverse of `to_table` (the step is a column of the table, not of a trajectory)."""
    result = []
    # In parts: as Python numbers the token streams of a whole file take some ten times the room of the arrays.
    for row in (row for part in table.to_batches(max_chunksize=_PART) for row in part.to_pylist()):
        row.pop("step")
        streams = {
            "ids": np.asarray(row.pop("ids"), np.int32),
            "loss_mask": np.asarray(row.pop("loss_mask"), bool),
            "logprobs": np.asarray(row.pop("logprobs"), np.float32),
            "turn_index": np.asarray(row.pop("turn_index"), np.int32),
        }
        for name in ("rewards", "info", "labels"):
            row[name] = json.loads(row[name])
            if not isinstance(row[name], dict):
                raise ValueError(f"`{name}` of a row is no JSON object")
        row["versions"] = tuple(row["versions"])
        row["stale"] = tuple(row["stale"] or ())
        row["probes"] = tuple(row["probes"] or ())
        if row.get("kept") is not None:
            row["kept"] = np.asarray(row["kept"], np.int32).reshape(len(streams["ids"]), -1)
        layers = row.pop("expert_layers", None)
        if row.get("experts") is not None:
            row["experts"] = np.asarray(row["experts"], np.int16).reshape(len(streams["ids"]), layers, -1)
        result.append(Trajectory(**row, **streams))
    return result


def write_parquet(path: str | Path, trajectories: Sequence[Trajectory], step: int = 0) -> None:
    """Writes one Parquet file; the file appears under its name only when it is complete.

    Raises:
      ConfigError: the file cannot be written (full disk, no permission).
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(to_table(trajectories, step), partial, compression="zstd")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write trajectories to {path}: {error}; free space or change --run-dir") from error


def read_parquet(path: str | Path, *, replay: bool = True) -> list[Trajectory]:
    """Reads a file of `write_parquet`.

    Args:
        replay: also what only a learner needs, `kept` and `experts`, which may be a hundred times the rest.

    Raises:
      ConfigError: the file is missing or is no trajectory file.
    """
    try:
        # Arrow fills columns that a foreign file lacks with nulls.
        found = pq.read_schema(path).names
        if lacking := [name for name in _SCHEMA.names if name not in found and name not in _LATER]:
            raise ValueError(f"it has no column `{lacking[0]}`")
        columns = [name for name in _SCHEMA.names if replay or name not in _REPLAYED]
        return from_table(pq.read_table(path, schema=_SCHEMA, columns=columns))
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read trajectories from {path}: no such file; check the path") from error
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"{path} is no trajectory file, or a damaged one ({reason}): name one of trajectories/"
        ) from error
