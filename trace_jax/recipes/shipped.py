"""The small policy that the package carries: where it is and what it says of itself. `trace-jax export --format
shipped` makes it, `Workspace.furnish` loads it.

The folder is a checkpoint in Hugging Face layout with the configuration of the run that it comes from (config.yaml) and
a manifest: where it comes from, digests of its files, and the score of exactly these files.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError, RunConfig
from trace_jax.evaluation import form
from trace_jax.policy import hf_files
from trace_jax.recipes.rundir import stored_config

AGENT = "shipped"
FOLDER = Path(__file__).resolve().parent.parent / "shipped"
CONFIG, MANIFEST = "config.yaml", "manifest.json"
_HELD = {"files": dict, "name": str, "parameters": int}  # without which it cannot be used or introduced


def manifest(folder: Path | None = None) -> dict[str, Any]:
    """What the policy says of itself.

    Raises:
        ConfigError: there is none, or it is not whole: it is written last.
    """
    folder = folder or FOLDER
    mend = "install trace-jax again, or name another agent with --agent"
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"no shipped policy in {folder}: {mend}")
    for key, kind in _HELD.items():
        if not isinstance(found.get(key), kind):
            raise ConfigError(f"{folder / MANIFEST} does not say the policy's {key}: {mend}")
    return found


def stored(folder: Path | None = None) -> RunConfig:
    """Its configuration. ConfigError as `manifest`."""
    manifest(folder)
    return stored_config(folder or FOLDER)


def is_one(folder: Path) -> bool:
    """Whether a directory's manifest is of a policy that was exported for this, whole or not."""
    named = {"stage": str, "files": {hf_files.WEIGHTS: str, CONFIG: str}}
    return form.read_if(folder / MANIFEST, named) is not None


def there() -> bool:
    """Whether this installation has one."""
    return (FOLDER / MANIFEST).is_file()


def digest(path: Path) -> str:
    """SHA-256 of a file, empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def check(folder: Path | None = None) -> Path:
    """The folder itself. ConfigError as `manifest`, or a file is not the one that the manifest names."""
    folder = folder or FOLDER
    for name, found in manifest(folder)["files"].items():
        if digest(folder / name) != found:
            raise ConfigError(f"{folder / name} is not the file that was shipped: install trace-jax again")
    return folder
