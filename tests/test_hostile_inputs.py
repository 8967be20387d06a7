"""Hostile SQL and Python in a real episode, with a neighbour's episode open and secrets within the host's reach.

For every snippet of `hostile/`: no secret in what the agent reads, nothing written or called outside, an answer within
twice the limit, the episode's variables and tables intact, the neighbour served, memory within its limits.
"""

import gc
import os
import socket
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from helpers_episodes import fake_set
from hostile.python_corpus import PYTHON
from hostile.sql_corpus import BOUNDED, REFUSED

from trace_jax.config import EnvironmentConfig
from trace_jax.environments import tools
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.warehouse import processes

SECONDS = 0.7  # limit of a call
MEMORY_MB = 128
TOKEN = "canary-" + os.urandom(8).hex()
SECRET = "TRACE_JAX_TEST_SECRET"
HOST_MEMORY = 200 * 2**20  # a sandbox may hold 64 MB, which take three times that as Python objects for a moment
TOTAL = "SELECT sum(clicks) FROM segment_daily"

# Tables and names in the reach of a replacement scan or of a frame walk.
hidden_labels = pa.table({"cause": [TOKEN]})
host_table = gt_episode = hidden_labels


class Arena:
    """Two episodes of one environment, canaries around them, and the checks after every snippet."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.port = _listen(self)
        self.calls = 0
        self.episodes = fake_set(2)
        config = EnvironmentConfig(prompt="full", tool_seconds=SECONDS, tool_characters=2000, memory_limit_mb=MEMORY_MB)
        self.environment = AdsEnvironment(self.episodes, config)
        self.task = self.environment.task(0)
        self.sibling = self.environment.open(self.task)
        self.neighbour = self.environment.open(self.environment.task(1))
        self.hidden = [self.episodes[k].hidden() for k in (0, 1)]  # in scope, as a host that grades has them
        totals = [int(self.episodes.batch.clicks[k].sum()) for k in (0, 1)]
        self.totals = [f"sum(clicks)\n{total:>11}" for total in totals]
        self.secrets = [TOKEN, self.episodes[1].campaign_id, f"A{self.episodes.batch.advertiser_id[1]}"]
        self.number = 0

    def run(self, code: str, refused: bool = False) -> str:
        """Everything wrong with one snippet's run, empty if all is well."""
        code = self.filled(code)
        wrong = []
        with self.environment.open(self.task) as episode:
            episode.step("intact = 7")
            for _ in range(2):  # a busy machine may be late once
                waited, start = episode._database.waited, time.monotonic()
                seen = episode.step(code)
                took = time.monotonic() - start - (episode._database.waited - waited)
                if took <= 2 * SECONDS:
                    break
            else:
                wrong.append(f"took {took:.2f} s")
            if any(secret in seen.text for secret in self.secrets):
                wrong.append("a secret came out")
            if refused and not seen.error:
                wrong.append("was not refused")
            if len(seen.text) > 2600:
                wrong.append(f"{len(seen.text)} characters came out")
            if seen.status == "tool_failure":
                wrong.append("the tool broke")
            after = episode.step("intact").text
            if after != "7":
                wrong.append(f"variables afterwards: {after}")
        self.number += 1
        for episode, total in zip((self.sibling, self.neighbour), self.totals, strict=True):
            answer = episode.step(f'sql("""{TOTAL} /* {self.number} */""")').text
            if answer != total:
                wrong.append(f"a query afterwards: {answer}")
        return f"{', '.join(wrong)}: {code[:120]!r} -> {seen.text[:200]!r}" if wrong else ""

    def filled(self, code: str) -> str:
        marks = {
            "@TMP@": self.folder / "elsewhere" / "canary.csv",
            "@CWD@": self.folder / "cwd" / "canary.csv",
            "@DIR@": self.folder / "elsewhere",
            "@PORT@": self.port,
            "@SECRET@": SECRET,
        }
        for mark, value in marks.items():
            code = code.replace(mark, str(value))
        return code

    def settings(self) -> dict[str, str]:
        """DuckDB's settings in the instance of the neighbour, without its counters."""
        shared = self.neighbour._database._shared
        with shared._loaded_worker() as worker:
            return worker.ask("settings", shared._key)[1]


def _listen(arena: Arena) -> int:
    server = socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            server.accept()[0].close()
            arena.calls += 1

    threading.Thread(target=accept, daemon=True).start()
    return server.getsockname()[1]


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    before = os.getcwd()
    for name in ("cwd", "elsewhere"):
        (folder / name).mkdir()
        (folder / name / "canary.csv").write_text(f"a,b\n{TOKEN},1\n")
    os.environ[SECRET] = TOKEN
    os.chdir(folder / "cwd")
    processes.workers().end()  # the workers of this test start with the secret around them
    made = Arena(folder)
    yield made
    os.chdir(before)
    del os.environ[SECRET]
    made.sibling.close()
    made.neighbour.close()


def _snapshot(folder: Path) -> list[tuple]:
    """Every file with its content's length and time, and what DuckDB keeps under the home directory."""
    home = Path.home() / ".duckdb"
    files = [*folder.rglob("*"), *(home.rglob("*") if home.exists() else [])]
    return sorted((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files)


class _Memory:
    """The highest resident memory of this process and of any database worker while it is open, in bytes."""

    def __enter__(self):
        gc.collect()
        self.start = self.host = _resident(os.getpid())
        self.worker = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.02):
            self.host = max(self.host, _resident(os.getpid()))
            self.worker = max([self.worker, *map(_resident, processes.workers().pids())])

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0  # no /proc here, or the process has ended


def _children() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def _call(query: str) -> str:
    plain = '"""' not in query and "\\" not in query and not query.endswith('"')
    return f'sql("""{query}""")' if plain else f"sql({query!r})"


FAMILIES = [
    *[(f"sql {name}", [_call(q) for q in queries], True) for name, queries in REFUSED.items()],
    *[(f"sql {name}", [_call(q) for q in queries], False) for name, queries in BOUNDED.items()],
    *[(f"python {name}", codes, False) for name, codes in PYTHON.items()],
]


def test_the_corpus_is_large_and_distinct():
    snippets = [code for _, codes, _ in FAMILIES for code in codes]
    assert len(set(snippets)) == len(snippets) >= 200


@pytest.mark.parametrize(("name", "codes", "refused"), FAMILIES, ids=[name for name, _, _ in FAMILIES])
def test_nothing_gets_out_or_does_harm(arena, name, codes, refused):
    settings, files, children = arena.settings(), _snapshot(arena.folder), _children()
    with _Memory() as memory:
        wrong = [problem for problem in (arena.run(code, refused) for code in codes) if problem]
    assert not wrong, f"{len(wrong)} of {len(codes)}:\n" + "\n".join(wrong)
    assert arena.settings() == settings
    assert _snapshot(arena.folder) == files and arena.calls == 0
    assert len(_children()) <= len(children) + 2  # workers that took the place of killed ones
    assert memory.host - memory.start <= HOST_MEMORY
    assert memory.worker <= (MEMORY_MB + 640) * 2**20


def test_a_database_worker_holds_no_secret(arena):
    (pid, *_) = processes.workers().pids()
    if not Path(f"/proc/{pid}/environ").exists():
        pytest.skip("what a process holds open is read from /proc, which this system lacks")
    assert TOKEN.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert TOKEN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    open_files = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    assert not any(TOKEN in name or str(arena.folder) in name for name in open_files)


def test_the_host_names_in_reach_are_real():
    """The bait works: with the replacement scan on, DuckDB would find the table above."""
    duckdb = pytest.importorskip("duckdb")
    assert duckdb.connect().execute("SELECT cause FROM hidden_labels").fetchall() == [(TOKEN,)]
    assert tools.MAX_PROCESSES >= 4 and len(gt_episode) == len(host_table) == 1
