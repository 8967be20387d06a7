"""Which study a directory belongs to, so that no study writes its tables over those of another, or into a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError
from trace_jax.evaluation import form
from trace_jax.recipes import places
from trace_jax.recipes.rundir import write_text
from trace_jax.recipes.studies import PLANTED, SCORED, STUDIES, TARGETING

FILE = "study.json"
TABLE = ("table.json", "table.md")
_FILES: dict[str, tuple[str, ...]] = {
    **{name: (f"{name}.json", f"{name}.md", f"{name}.svg") for name in SCORED},
    **dict.fromkeys(STUDIES, (*TABLE, "curves.svg", "source.txt")),
    PLANTED: TABLE,
    TARGETING: (*TABLE, "costs.json", "worlds.json", "worlds.md"),
}
_LEADERBOARD = {"benchmark": {}, "agents": {}, "paper": {}, "tests": [{}], "missing": [str]}


def claim(out: Path, name: str, about: dict[str, Any] | None = None) -> Path:
    """Makes the directory of a study, or takes it up again; returns it with links resolved.

    Args:
        about: what else `study.json` of a new one holds.

    Raises:
        ConfigError: a run lies there, another study (those of `SCORED` share runs and lie together), or files that the
            study would replace; it cannot be written to.
    """
    out = places.folder(out)
    if (out / "config.yaml").exists():
        raise ConfigError(f"--out {out} is a run, not a study: choose another directory")
    before = studies_of(out)
    if before and not before & (set(SCORED) if name in SCORED else {name}):
        raise ConfigError(f"--out {out} holds the study {' or '.join(sorted(before))}: choose another --out for {name}")
    for file in (*_FILES[name], FILE):
        if (out / file).is_dir() or (not before and (out / file).exists()):
            raise ConfigError(f"--out {out} has a {file} that is not of this study: choose another directory")
    if not (out / FILE).exists():
        write_text(out / FILE, json.dumps({"study": name} | (about or {}), indent=1) + "\n")
    return out


def studies_of(out: Path) -> set[str]:
    """Names of the studies that a directory may be of, empty if it is of none."""
    named = {"study": str}
    for file in (FILE, *_table_files()):
        if found := form.read_if(out / file, named):
            return {found["study"]}
    # Studies of earlier versions, before their first table.
    if form.read_if(out / FILE, {"source": str, "fields": {}}):
        return {TARGETING}
    return set(STUDIES) if (out / "source.txt").is_file() else set()


def _table_files() -> Sequence[str]:
    return (TABLE[0], *(f"{name}.json" for name in SCORED))


def for_table(out: Path) -> Path:
    """The directory of `eval --table --out`, with links resolved.

    Raises:
        ConfigError: a study lies there, or a table that is not of `eval --table`; it cannot be written to.
    """
    out = places.folder(out)
    if before := studies_of(out):
        raise ConfigError(f"--out {out} holds the study {' or '.join(sorted(before))}: choose another directory")
    taken = next((file for file in TABLE if (out / file).exists()), None)
    if taken and form.read_if(out / TABLE[0], _LEADERBOARD) is None:
        raise ConfigError(f"--out {out} has a {taken} that `eval --table` did not write: choose another directory")
    return out
