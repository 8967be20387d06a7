"""Tool throughput: calls a second through the agent's Python tool, against bare DuckDB on the same tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import duckdb
import pyarrow as pa

from trace_jax.bench import measure
from trace_jax.config import RunConfig
from trace_jax.environments.ads import queries
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.environments.base import Episode
from trace_jax.simulator.stream import accepted_episodes
from trace_jax.warehouse.splits import EpisodeSet

EPISODES = 16


def run(config: RunConfig, repeats: int) -> dict[str, Any]:
    """Ask opened episodes the analyst's questions: cold, as the rest of a GRPO group, and with Python around them.

    Every repeat takes these and the bare database in turn, so that a change of the machine's load meets all alike.
    """
    composition = {("BUDGET_CAP", 0): EPISODES}  # the cause does not change what a query costs
    episodes = EpisodeSet(*accepted_episodes(config.simulator, 0, "bench", composition), split="bench")
    environment = AdsEnvironment(episodes, config.environment)
    tasks = [environment.task(i) for i in range(len(episodes))]
    bare = [_bare_database(record.visible()) for record in episodes]
    asked = [queries.overview(), queries.single(), queries.scan(), queries.mix()]
    plain = [f'sql("""{query}""")' for query in asked]
    scripted = [f"rows = {code}\nlen(rows)" for code in plain]
    workers, group = config.rollout.tool_workers, config.grpo.group

    with ThreadPoolExecutor(workers) as pool:

        def each(work: Callable[[int], Any]) -> list[Any]:
            return list(pool.map(work, range(len(tasks))))

        def ask(members: list[list[Episode]], codes: list[str]) -> None:
            each(lambda i: [_ask(episode, code) for code in codes for episode in members[i]])

        def close(members: list[list[Episode]]) -> None:
            for episode in itertools.chain(*members):
                episode.close()

        def one_round() -> dict[str, float]:
            opened: list[list[Episode]] = []
            times = {"open": measure.timed(lambda: opened.extend(each(lambda i: [environment.open(tasks[i])])))}
            others = each(lambda i: [environment.open(tasks[i]) for _ in range(group - 1)])
            times["cold"] = measure.timed(lambda: ask(opened, plain))
            times["cached"] = measure.timed(lambda: ask(others, plain))
            close(opened)
            close(others)
            opened = each(lambda i: [environment.open(tasks[i])])
            times["python"] = measure.timed(lambda: ask(opened, scripted))
            close(opened)
            times["bare"] = measure.timed(lambda: each(lambda i: [bare[i].execute(q).fetchall() for q in asked]))
            return times

        rounds = [one_round() for _ in range(repeats + 1)][1:]  # the first one starts workers and pools
    for connection in bare:
        connection.close()
    taken = {name: measure.spread([r[name] for r in rounds]) for name in rounds[0]}
    calls = len(tasks) * len(asked)
    rate = {name: calls / taken[name]["median"] for name in ("cold", "python", "bare")}
    return {
        "sizes": {"episodes": len(tasks), "calls_per_episode": len(asked), "group": group, "workers": workers},
        "floor": {"bare_queries_per_second": rate["bare"]},
        "measured": {
            "seconds": {name: t for name, t in taken.items() if name != "bare"},
            "episodes_opened_per_second": len(tasks) / taken["open"]["median"],
            "calls_per_second": rate["cold"],
            "cached_calls_per_second": calls * (group - 1) / taken["cached"]["median"],
            "python_calls_per_second": rate["python"],
            "group_calls_per_second": calls * group / (taken["cold"]["median"] + taken["cached"]["median"]),
        },
        "share": {"of_bare_duckdb": rate["cold"] / rate["bare"]},
    }


def _bare_database(tables: Mapping[str, pa.Table]) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config={"threads": 1})
    for name, table in tables.items():
        connection.register("incoming", table)
        connection.execute(f"CREATE TABLE {name} AS SELECT * FROM incoming")
        connection.unregister("incoming")
    return connection


def _ask(episode: Episode, code: str) -> None:
    seen = episode.step(code)
    if seen.error:
        raise RuntimeError(f"bench tools: a query failed: {seen.text}")
