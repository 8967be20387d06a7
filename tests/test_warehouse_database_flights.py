"""Several threads and several processes: one run of a query for all who ask, and workers that are killed."""

import os
import signal
import threading
import time

import pytest
from helpers_episodes import fake_set

from trace_jax.warehouse import database, processes
from trace_jax.warehouse.database import EpisodeDatabase, QueryError, QueryResult, QueryTimeout

TABLES = ", ".join(f"segment_daily {name}" for name in "abcdef")
SLOW = f"SELECT sum(hash(a.clicks, b.clicks, c.clicks, d.clicks, e.clicks, f.clicks)) FROM {TABLES}"
DOUBLED = "SELECT 1 AS a0, " + ", ".join(f"a{i} + a{i} AS a{i + 1}" for i in range(28))  # the binder never ends


@pytest.fixture
def db():
    with EpisodeDatabase(fake_set(1)[0].visible(), memory_limit_mb=128) as opened:
        yield opened


def _together(*works):
    """Run the functions at once, each in its thread; their results or errors in order."""
    results, gate = [None] * len(works), threading.Barrier(len(works))

    def run(k):
        gate.wait()
        try:
            results[k] = works[k]()
        except QueryError as error:
            results[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(works))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return results


def _counted(monkeypatch):
    asked, ask = [], processes.Worker.ask

    def counting(self, operation, *arguments, **options):
        if operation == "query":
            asked.append(arguments[1])
        return ask(self, operation, *arguments, **options)

    monkeypatch.setattr(processes.Worker, "ask", counting)
    return asked


def test_a_query_asked_at_once_runs_once(db, monkeypatch):
    asked = _counted(monkeypatch)
    query = "SELECT count(*) FROM range(3000000) t(x) WHERE hash(x) % 7 = 0"
    handles = [db.clone() for _ in range(8)]
    results = _together(*[lambda h=h: h.query(query, timeout_s=30) for h in handles])
    assert asked == [query] and len({id(r) for r in results}) == 1 and isinstance(results[0], QueryResult)
    other = _together(*[lambda h=h: h.query("SELECT nope FROM segment_daily", timeout_s=30) for h in handles])
    assert len(asked) == 2 and len({str(r) for r in other}) == 1 and isinstance(other[0], QueryError)
    assert len({id(r) for r in other}) == len(other)  # an error is raised fresh for everybody
    db.query(query + " ")  # another text: only the very same one is the same query
    assert len(asked) == 3
    [h.close() for h in handles]


def test_each_waits_to_its_own_limit(db):
    def timed(handle, seconds):
        start = time.monotonic()
        with pytest.raises(QueryTimeout):
            handle.query(SLOW, timeout_s=seconds)
        return time.monotonic() - start

    db.query("SELECT 1")
    long, short = _together(lambda: timed(db, 1.5), lambda: timed(db.clone(), 0.3))
    assert 1.4 < long < 3.5 and 0.25 < short < 1.2


def test_a_failed_leader_does_not_poison_those_who_wait(db, monkeypatch):
    real, led = database._Shared._run, []

    def first_gives_up(self, sql, left, seconds):
        led.append(threading.get_ident())
        if len(led) == 1:
            time.sleep(0.3)
            return database._stopped(seconds), False, 0.0
        return real(self, sql, left, seconds)

    monkeypatch.setattr(database._Shared, "_run", first_gives_up)
    results = _together(*[lambda h=db.clone(): h.query("SELECT 42", timeout_s=10) for _ in range(4)])
    assert sorted(type(r).__name__ for r in results) == ["QueryResult"] * 3 + ["QueryTimeout"]
    assert len(led) == 2  # one of the others ran it, for all of them


def test_a_leader_that_breaks_frees_the_query(db, monkeypatch):
    def broken(self, sql, left, seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(database._Shared, "_run", broken)
        with pytest.raises(KeyboardInterrupt):
            db.query("SELECT 43")
    assert db.query("SELECT 43", timeout_s=5).rows == ((43,),)


def test_a_query_that_cannot_be_interrupted_is_killed_in_time(db):
    neighbour = EpisodeDatabase(fake_set(2)[1].visible())
    expected = neighbour.query("SELECT sum(clicks) FROM segment_daily").rows
    before = set(processes.workers().pids())
    start = time.monotonic()
    with pytest.raises(QueryTimeout, match="after 1 s"):
        db.query(DOUBLED, timeout_s=1.0)
    assert time.monotonic() - start < 2.0
    gone = before - set(processes.workers().pids())
    assert len(gone) == 1 and not any(_alive(pid) for pid in gone)
    assert db.query("SELECT 1 + 1", timeout_s=20).rows == ((2,),)
    assert neighbour.query("SELECT sum(clicks) + 0 FROM segment_daily").rows == expected
    neighbour.close()


def _kill_workers():
    for pid in processes.workers().pids():
        os.kill(pid, signal.SIGKILL)


def test_a_query_whose_worker_is_killed_is_asked_again(db, monkeypatch):
    """The kernel may kill a worker when memory is short: what the agent reads must not depend on it."""
    killed, ask = [], processes.Worker.ask

    def dying(self, operation, *arguments, **options):
        if operation == "query" and not killed:
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        return ask(self, operation, *arguments, **options)

    monkeypatch.setattr(processes.Worker, "ask", dying)
    assert db.query("SELECT 3", timeout_s=60).rows == ((3,),)
    assert killed and killed[0] not in processes.workers().pids()


def test_a_crash_of_the_engine_is_an_error_of_its_query(db):
    """A query whose workers die one after the other, as if of memory that the engine does not count."""
    over = threading.Event()

    def ask():
        try:
            return db.query(SLOW, timeout_s=20)
        finally:
            over.set()

    def kill():
        while not over.wait(0.4):
            _kill_workers()

    db.query("SELECT 1")
    start = time.monotonic()
    results = _together(ask, kill)
    assert isinstance(results[0], QueryError) and time.monotonic() - start < 20
    assert db.query("SELECT 7", timeout_s=20).rows == ((7,),)


def test_a_worker_that_died_idle_is_not_noticed(db):
    db.query("SELECT 1")
    for pid in processes.workers().pids():
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.3)
    assert db.query("SELECT 8", timeout_s=20).rows == ((8,),)
    with EpisodeDatabase(fake_set(1)[0].visible()) as other:
        assert other.query("SELECT 9", timeout_s=20).rows == ((9,),)


def test_workers_that_cannot_start_are_an_error_in_words(db, monkeypatch):
    monkeypatch.setattr(processes.sys, "executable", "/bin/false")
    pool = processes.Workers()
    monkeypatch.setattr(processes, "workers", lambda: pool)
    with pytest.raises(QueryError, match="cannot load an episode's tables"):
        db.query("SELECT 10", timeout_s=20)
    with pytest.raises(RuntimeError, match="exit status 1"):
        EpisodeDatabase(fake_set(1)[0].visible())
    pool.end()


def test_memory_outside_the_engine_is_bounded(db):
    text = "'xxxxxxxxxx'"
    for _ in range(8):
        text = f"replace({text}, 'x', 'xxxxxxxxxx')"
    with pytest.raises(QueryError, match="(?i)memory"):
        db.query(f"SELECT length({text})", timeout_s=20)
    assert db.query("SELECT 7", timeout_s=20).rows == ((7,),)


def test_one_slow_query_does_not_hold_up_the_others(db):
    neighbour = EpisodeDatabase(fake_set(2)[1].visible())

    def quick():
        time.sleep(0.2)
        return [neighbour.query(f"SELECT {k}", timeout_s=30).rows for k in range(20)]

    start = time.monotonic()
    slow, quick_rows = _together(lambda: db.query(SLOW, timeout_s=3.0), quick)
    assert isinstance(slow, QueryTimeout) and quick_rows == [((k,),) for k in range(20)]
    assert time.monotonic() - start < 6
    neighbour.close()


def test_workers_stay_few_and_are_recycled(db, monkeypatch):
    monkeypatch.setattr(processes, "MAX_REQUESTS", 10)
    seen = set()
    for k in range(40):
        assert db.query(f"SELECT {k}", timeout_s=20).rows == ((k,),)
        seen |= set(processes.workers().pids())
    assert len(seen) >= 4 and len(processes.workers().pids()) <= processes.MAX_WORKERS
    assert not any(_alive(pid) for pid in seen - set(processes.workers().pids()))


def test_more_episodes_than_a_worker_holds(monkeypatch):
    monkeypatch.setattr(processes, "MAX_EPISODES", 3)
    records = list(fake_set(5, days=4))
    opened = [EpisodeDatabase(record.visible()) for record in records]
    totals = [int(record.batch.clicks[record.position].sum()) for record in records]
    for k in range(3):
        for one, total in zip(opened, totals, strict=True):
            assert one.query(f"SELECT sum(clicks), {k} FROM segment_daily").rows == ((total, k),)
    [one.close() for one in opened]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
