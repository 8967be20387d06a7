"""`trace-jax simulate --export PLATFORM`: episodes as a platform's reports, with the truth beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.config import ConfigError, RunConfig
from trace_jax.evaluation import form
from trace_jax.recipes import places
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.simulator.accepted import accepted_episodes
from trace_jax.simulator.stream import Composition, composition_for
from trace_jax.warehouse import exports
from trace_jax.warehouse.files import disk, replace
from trace_jax.warehouse.splits import EpisodeSet

EPISODES = 4  # without --episodes
MOST = 500
SURPLUS = 8  # episodes simulated for one that is kept: a slice may sit in a dimension that the platform does not report
TRUTH = "truth.json"
_TRUTH = [{"platform": str, "files": [str]}]
_NAME = re.compile(rf"({'|'.join(exports.PLATFORMS)})-\d{{3}}-(slices|campaigns|report)\.csv")


def draw(config: RunConfig, platform: str, size: int, composition: Composition | None = None) -> EpisodeSet:
    """`size` episodes whose slices the platform reports, disjoint from all splits.

    Args:
        composition: to draw from, by default that of the splits.

    Raises:
        ConfigError: too few of the composition are visible in the platform's report.
    """
    with Interrupt() as interrupt:
        wanted = composition or composition_for(config.simulator, SURPLUS * max(size, 4))

        def report(*_: int) -> None:
            interrupt.check()

        found = accepted_episodes(config.simulator, config.data.seed, f"export-{platform}", wanted, on_progress=report)
    every = EpisodeSet(*found, split=f"export-{platform}")
    shown = [i for i, record in enumerate(every) if exports.PLATFORMS[platform].shows(record)]
    order = np.random.default_rng(config.data.seed).permutation(shown)[:size]
    if len(order) < size:
        raise ConfigError(f"only {len(order)} of {len(every)} episodes show in a report of {platform}: ask for fewer")
    return every.take(np.sort(order))


def command(config: RunConfig, platform: str, out: Path, episodes: int | None) -> dict[str, Any]:
    """Writes the reports of some episodes and `truth.json` into a directory, in the place of an earlier export there.

    They are put in place when all are written: an interrupted export leaves the earlier one as it was.

    Raises:
        ConfigError: a directory that holds something else, or a full disk. Interrupted: nothing is left of it.
    """
    size = EPISODES if episodes is None else episodes
    if not 1 <= size <= MOST:
        raise ConfigError(f"--episodes {size}: --export writes 1 to {MOST}")
    stems = [f"{platform}-{number:03d}" for number in range(size)]
    with disk(out), Interrupt() as interrupt:
        stale = _replaced(out, {exports.name(stem, word) for stem in stems for word in exports.words(platform)})
        with places.beside(out) as partial:
            found, truth = draw(config, platform, size), []
            with Progress().bar(platform, size) as bar:
                for number, (stem, record) in enumerate(zip(stems, found, strict=True)):
                    interrupt.check()
                    paths = exports.write(record, platform, partial, stem)
                    truth.append({"files": [p.name for p in paths]} | exports.truth(record, platform))
                    bar.update(number + 1)
            replace(partial / TRUTH, (json.dumps(truth, indent=1) + "\n").encode())
            interrupt.check()
            for name in stale:
                (out / name).unlink(missing_ok=True)
            places.put(partial, out, TRUTH)
    first = " ".join(str(out / name) for name in truth[0]["files"])
    print(f"{out}: {size} episodes as reports of {platform}, the truth in {TRUTH}")
    print(f"try: trace-jax diagnose {first} --campaign {truth[0]['campaign']} --yes")
    return {"out": str(out), "platform": platform, "episodes": truth}


def _replaced(out: Path, new: set[str]) -> list[str]:
    """Files of an earlier export in a directory that are not among the `new` ones.

    Raises:
        ConfigError: it holds something else, or a file of somebody's has a new one's name.
    """
    if not out.is_dir():
        return []
    there = {path.name for path in out.iterdir()} - {places.PARTIAL}
    if not there:
        return []
    listed = [name for entry in form.read_if(out / TRUTH, _TRUTH) or [] for name in entry["files"]]
    if not listed or not all(map(_NAME.fullmatch, listed)):
        raise ConfigError(f"{out} holds something else ({min(there)}): choose an empty directory for --out")
    if taken := (new & there) - set(listed):
        raise ConfigError(f"{out / min(taken)} is not of the export that lies there: move it, or choose another --out")
    return sorted(set(listed) - new)
