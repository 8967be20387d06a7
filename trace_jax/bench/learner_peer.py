"""Where the peer of the learner benchmark is, and which Python runs it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from trace_jax.bench import rollout_peer

SCRIPT = Path(__file__).parent / "peers" / "transformers_grpo.py"


def interpreter(wanted: str | Path | None) -> tuple[str | None, str | None]:
    """Which Python runs the peer.

    Returns:
      Its path, or None and what to do about it.
    """
    if wanted is not None:
        return str(wanted), None
    if all(importlib.util.find_spec(name) for name in rollout_peer.PACKAGES):
        return sys.executable, None
    return None, f"vs_torch is null: run again with --peers PYTHON, an interpreter after `{rollout_peer.INSTALL}`"
