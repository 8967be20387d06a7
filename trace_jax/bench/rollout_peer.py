"""Another sampler in a process of its own: an interpreter with other packages, asked line by line.

The process stays alive, so that what it does and what this process does can be timed in turn.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import safetensors.numpy

from trace_jax.config import ConfigError
from trace_jax.policy import hf
from trace_jax.policy.transformer import Transformer

SCRIPT = Path(__file__).parent / "peers" / "transformers_generate.py"
PACKAGES = ("torch", "transformers")
SECONDS = 600.0  # that an answer may take
INSTALL = "pip install torch transformers"


class Peer:
    """A running peer script. Use as a context manager: the process ends with it."""

    def __init__(self, python: str | Path, script: Path | None = None):
        """Starts the script (`SCRIPT`) and waits for its greeting.

        Raises:
          ConfigError: no such interpreter, or it lacks a package.
        """
        self._python, script = str(python), script or SCRIPT
        self._complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [self._python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                text=True,
            )
        except OSError as error:
            self._complaints.close()
            raise ConfigError(
                f"--peers {python}: {error.strerror or error}; give the path of a Python interpreter with "
                f"{' and '.join(PACKAGES)}"
            ) from error
        try:
            greeting = self._answer()
        except RuntimeError as error:
            self.close()
            raise ConfigError(f"--peers {python} is no Python that runs {script.name}: {error}") from error
        if "error" in greeting:
            self.close()
            raise ConfigError(f"--peers {python}: {greeting['error']}; {self._python} -m {INSTALL}")
        self.versions: dict[str, str] = greeting["versions"]

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request.

        Raises:
          RuntimeError: the peer failed, died or took too long.
        """
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer says it, with the reason
        answer = self._answer()
        if "error" in answer:
            raise RuntimeError(f"the peer {self._python} failed: {answer['error']}")
        return answer

    def load(self, name: str, model: Transformer) -> int:
        """Gives it a model of ours under a name; its number of parameters, as the peer counts them."""
        with tempfile.TemporaryDirectory() as directory:
            settings = hf.config_json(model.cfg, model.vocab_size)
            (Path(directory) / hf.CONFIG).write_text(json.dumps(settings))
            safetensors.numpy.save_file(hf.tensors(model), Path(directory) / hf.WEIGHTS, metadata={"format": "pt"})
            return self.ask("load", name=name, directory=directory)["parameters"]

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):  # a request that a dead peer never read
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._complaints.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        watch = threading.Timer(SECONDS, self._process.kill)
        watch.daemon = True
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        try:
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
        except ValueError:
            pass
        raise RuntimeError(f"the peer {self._python} gave no answer: {self._complaint() or line.strip() or 'it ended'}")

    def _complaint(self) -> str:
        self._process.poll()
        self._complaints.seek(0)
        return next(reversed(self._complaints.read().strip().splitlines()), "")


def interpreter(wanted: str | Path | None) -> tuple[str | None, str | None]:
    """Which Python runs the peer.

    Returns:
      Its path, or None and what to do about it.
    """
    if not SCRIPT.exists():
        if wanted is not None:
            raise ConfigError(f"--peers needs a checkout of trace-jax: {SCRIPT.name} is not part of an installation")
        return None, f"vs_transformers is null: it needs a checkout of trace-jax ({SCRIPT.name} is not installed)"
    if wanted is not None:
        return str(wanted), None
    if all(importlib.util.find_spec(name) for name in PACKAGES):
        return sys.executable, None
    return None, f"vs_transformers is null: run again with --peers PYTHON, an interpreter after `{INSTALL}`"
