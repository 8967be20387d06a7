"""Which tasks an evaluation was made on: results are comparable where this is the same."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from trace_jax.environments.base import Environment


def benchmark_of(environment: Environment) -> dict[str, Any]:
    """`{"episodes": how many, "sha256": of their content}` and what else the environment says of them.

    An environment that has an `identity` of its own says what its tasks are, however they are worded; of others the
    questions, right answers and labels are hashed.
    """
    own = getattr(environment, "identity", None)
    return {"episodes": len(environment), **(own() if own is not None else {"sha256": _of_tasks(environment)})}


def _of_tasks(environment: Environment) -> str:
    digest = hashlib.sha256()
    for i in range(len(environment)):
        task = environment.task(i)
        content = [task.user, task.gold_answer, task.labels]
        digest.update(json.dumps(content, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def line(benchmark: dict[str, Any]) -> str:
    """One line for people."""
    return f"benchmark: {benchmark['episodes']} episodes, sha256 {benchmark['sha256']}"
