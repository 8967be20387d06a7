"""Programs that are compiled once a session, by test processes and by the commands that tests start; the order of files
in a run of several processes (`-n 2`)."""

import os
import shutil
import tempfile

import helpers_browser
import pytest

# Files that take a minute or about that, longest first: begun last, one of them would leave the other processes idle.
LONGEST = ("test_recipes_smoke", "test_rollout_stress", "test_bench_kinds", "test_rollout_models", "test_policy_hybrid")


# A test runs its programs once or twice, so compiling them costs more than what optimising them saves.
_LEVEL = "--xla_backend_optimization_level"
if _LEVEL not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_LEVEL}=0".strip()


def pytest_configure(config):
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # one's own, or in a process of xdist this session's
        return
    folder = tempfile.mkdtemp(prefix="trace-jax-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium; see tests/helpers_browser.py."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is in the extra `browser`")
    if not (program := helpers_browser.chromium()):
        pytest.skip("no Chromium here: install it, or name one in TRACE_JAX_CHROMIUM")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        rank = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
