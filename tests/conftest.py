"""Programs that are compiled once a session: by test processes, and by the commands and scripts that tests start."""

import os
import shutil
import tempfile


def pytest_configure(config):
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # one's own, or in a process of xdist this session's
        return
    folder = tempfile.mkdtemp(prefix="trace-jax-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
