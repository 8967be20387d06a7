"""Warehouse and tool throughput, each against the plain way on the same tables in the same run.

Loading of episodes against a row-wise insert, queries and calls of the agent's Python tool against bare DuckDB, and the
wait for the first answer about a long episode.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
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
from trace_jax.simulator.accepted import accepted_episodes
from trace_jax.warehouse import database
from trace_jax.warehouse.database import EpisodeDatabase
from trace_jax.warehouse.schema import COLUMNS
from trace_jax.warehouse.splits import EpisodeSet

EPISODES = 16
LONG = {"days": 56, "siblings": 3}  # a long episode: eight weeks of four campaigns
FIRST = "SELECT ds, sum(clicks) / nullif(sum(impressions), 0) AS ctr FROM segment_daily GROUP BY ds ORDER BY ds"
LONG_EPISODES = 4  # opened in one repeat
ROWWISE_EPISODES = 1  # in one repeat; each takes about half a second


def run(config: RunConfig, repeats: int) -> dict[str, Any]:
    """Ask opened episodes the analyst's questions: cold, as the rest of a GRPO group, and with Python around them; load
    episodes from Arrow tables and from the simulator's arrays.

    Every repeat takes these, the bare database and the row-wise insert in turn, so that a change of the machine's load
    meets all alike.
    """
    episodes = _episodes(config, EPISODES)
    lengthened = dataclasses.replace(config, simulator=dataclasses.replace(config.simulator, **LONG))
    long = _episodes(lengthened, LONG_EPISODES)
    limit = config.environment.memory_limit_mb
    tables = [record.visible() for record in episodes]
    rows = [_rows(t) for t in tables[:ROWWISE_EPISODES]]
    environment = AdsEnvironment(episodes, config.environment)
    tasks = [environment.task(i) for i in range(len(episodes))]
    bare = [_bare_database(t) for t in tables]
    asked = [queries.overview(), queries.single(), queries.scan(), queries.mix()]
    plain = [f'sql("""{query}""")' for query in asked]
    scripted = [f"rows = {code}\nlen(rows)" for code in plain]
    workers, group = config.rollout.tool_workers, config.grpo.group

    with ThreadPoolExecutor(workers) as pool:

        def each(work: Callable[[int], Any]) -> list[Any]:
            return list(pool.map(work, range(len(tasks))))

        def ask(members: list[list[Episode]], codes: list[str]) -> None:
            each(lambda i: [_ask(episode, code) for code in codes for episode in members[i]])

        def load(content: Mapping[str, pa.Table]) -> EpisodeDatabase:
            return EpisodeDatabase(content, memory_limit_mb=limit)

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
            loaded: list[EpisodeDatabase] = []
            times["arrow"] = measure.timed(lambda: loaded.extend(map(load, tables)))
            times["queries"] = measure.timed(lambda: each(lambda i: [loaded[i].query(q) for q in asked]))
            for held in loaded:
                held.close()
            loaded = []
            times["arrays"] = measure.timed(lambda: loaded.extend(load(r.visible()) for r in episodes))
            for held in loaded:
                held.close()
            times["rowwise"] = sum(map(_rowwise_seconds, rows))
            return times

        rounds = [one_round() for _ in range(repeats + 1)][1:]  # the first one starts workers and pools
    for connection in bare:
        connection.close()
    taken = {name: measure.spread([r[name] for r in rounds]) for name in rounds[0]}
    # Last, because it closes the emptied instances that the rounds above open their episodes in.
    waits = [_first_answers_seconds(long, i, limit) for _ in range(repeats + 1) for i in range(len(long))]
    for name, times in zip(("open_56_days", "overview_56_days"), zip(*waits[len(long) :], strict=True), strict=True):
        taken[name] = measure.spread(times)
    calls = len(tasks) * len(asked)
    rate = {name: calls / taken[name]["median"] for name in ("cold", "queries", "python", "bare")}
    speedup = [(r["rowwise"] / len(rows)) / (r["arrow"] / len(tasks)) for r in rounds]
    return {
        "sizes": {
            "episodes": len(tasks),
            "rows_per_episode": sum(t.num_rows for t in tables[0].values()),
            "rows_of_56_days": sum(t.num_rows for t in long[0].visible().values()),
            "calls_per_episode": len(asked),
            "group": group,
            "workers": workers,
        },
        "floor": {"bare_queries_per_second": rate["bare"]},
        "measured": {
            "seconds": {name: t for name, t in taken.items() if name != "bare"},
            "arrow_episodes_per_s": len(tasks) / taken["arrow"]["median"],
            "arrays_episodes_per_s": len(tasks) / taken["arrays"]["median"],
            "rowwise_episodes_per_s": len(rows) / taken["rowwise"]["median"],
            "arrow_speedup": statistics.median(speedup),
            "open_56_days_ms": 1e3 * taken["open_56_days"]["median"],
            "overview_56_days_ms": 1e3 * taken["overview_56_days"]["median"],
            "queries_per_s": rate["queries"],
            "episodes_opened_per_second": len(tasks) / taken["open"]["median"],
            "calls_per_second": rate["cold"],
            "cached_calls_per_second": calls * (group - 1) / taken["cached"]["median"],
            "python_calls_per_second": rate["python"],
            "group_calls_per_second": calls * group / (taken["cold"]["median"] + taken["cached"]["median"]),
        },
        "share": {"of_bare_duckdb": rate["cold"] / rate["bare"]},
    }


def _episodes(config: RunConfig, count: int) -> EpisodeSet:
    """Accepted episodes of one cause: it does not change what loading and asking cost."""
    return EpisodeSet(*accepted_episodes(config.simulator, 0, "bench", {("BUDGET_CAP", 0): count}), split="bench")


def _rows(tables: Mapping[str, pa.Table]) -> dict[str, list[list[Any]]]:
    """The rows of each table as Python values, ready for `executemany`."""
    return {name: list(map(list, zip(*table.to_pydict().values(), strict=True))) for name, table in tables.items()}


def _rowwise_seconds(rows: Mapping[str, list[list[Any]]]) -> float:
    """Seconds to insert the rows of one episode the obvious way: typed tables, `executemany`, one transaction.

    Connecting and converting to Python values are left out, in favour of this way.
    """
    with duckdb.connect(config={"threads": 1}) as connection:
        for name in rows:
            columns = ", ".join(f"{column} {kind}" for column, kind in COLUMNS[name].items())
            connection.execute(f"CREATE TABLE {name} ({columns})")

        def insert() -> None:
            connection.execute("BEGIN")
            for name, values in rows.items():
                marks = ", ".join("?" * len(values[0]))
                connection.executemany(f"INSERT INTO {name} VALUES ({marks})", values)
            connection.execute("COMMIT")

        return measure.timed(insert)


def _first_answers_seconds(episodes: EpisodeSet, position: int, memory_limit_mb: int) -> tuple[float, float]:
    """Seconds from an episode's arrays, in an instance that is new, to the answer of a plain first question (`FIRST`),
    and on to that of the analyst's first one, which compares five metrics with the siblings'."""
    database.close_idle()
    opened: list[EpisodeDatabase] = []

    def first() -> None:
        opened.append(EpisodeDatabase(episodes[position].visible(), memory_limit_mb=memory_limit_mb))
        opened[0].query(FIRST)

    opening = measure.timed(first)
    overview = measure.timed(lambda: opened[0].query(queries.overview()))
    opened[0].close()
    return opening, opening + overview


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
