"""The console script starts itself again once, with memory kept, and only where that can work."""

import os
import signal
import subprocess
import sys

import pytest

from trace_jax import startup

ALL = (
    "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1"
)


@pytest.fixture
def glibc(monkeypatch):
    monkeypatch.setattr(startup.platform, "libc_ver", lambda: ("glibc", "2.36"))


def test_asks_for_everything(glibc):
    assert startup.wanted({}) == ALL


def test_keeps_what_the_user_says(glibc):
    said = startup.wanted({"GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.arena_max=4"})
    assert said == "glibc.malloc.check=3:glibc.malloc.arena_max=4:" + ALL.replace("glibc.malloc.arena_max=1:", "")


@pytest.mark.parametrize("environment", [{"GLIBC_TUNABLES": ALL}, {"TRACE_JAX_KEEP_MEMORY": "0"}])
def test_is_content(environment, glibc):
    assert startup.wanted(environment) is None


@pytest.mark.parametrize("library", [("glibc", "2.31"), ("", "")])
def test_another_c_library(library, monkeypatch):
    monkeypatch.setattr(startup.platform, "libc_ver", lambda: library)
    assert startup.wanted({}) is None


def test_starts_itself_again_with_its_arguments(tmp_path):
    """The second start is the same process, with the variable and the same arguments, whatever is in them."""
    script = tmp_path / "command.py"
    script.write_text(
        "import os, sys\n"
        "from trace_jax import cli, startup\n"
        "startup.platform.libc_ver = lambda: ('glibc', '2.36')\n"
        "cli.main = lambda: print(os.getpid(), os.environ.get('GLIBC_TUNABLES'), sys.argv[1:]) or 3\n"
        "print(os.getpid(), flush=True)\n"
        "sys.exit(startup.main())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("GLIBC_TUNABLES", "TRACE_JAX_KEEP_MEMORY")}
    command = [sys.executable, str(script), "a b", "--x=ü", ""]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    first, second, last = done.stdout.splitlines()
    assert done.returncode == 3 and first == second
    assert last == f"{first} {ALL} ['a b', '--x=ü', '']"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_modules_are_loaded_is_no_traceback(number, tmp_path):
    script = (
        "import os, sys, types\n"
        "from trace_jax import startup\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        os.kill(os.getpid(), {int(number)}) if name == 'trace_jax.cli' else None\n"
        "sys.meta_path.insert(0, Finder())\n"
        "startup.main()\n"
    )
    environment = os.environ | {startup.OFF: "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "\ninterrupted\n")
