"""`trace-jax simulate --export PLATFORM`: episodes as a platform's reports, with the truth beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.config import ConfigError, RunConfig
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
    """Writes the reports of some episodes and `truth.json` into a directory.

    Raises:
        ConfigError: a directory that holds something else, or a full disk.
    """
    size = EPISODES if episodes is None else episodes
    if not 1 <= size <= MOST:
        raise ConfigError(f"--episodes {size}: --export writes 1 to {MOST}")
    with disk(out):
        if out.is_dir() and any(out.iterdir()) and not (out / "truth.json").is_file():
            raise ConfigError(f"{out} holds something else: choose an empty directory for --out")
        out.mkdir(parents=True, exist_ok=True)
    found = draw(config, platform, size)
    truth = []
    with Progress().bar(platform, size) as bar, disk(out):
        for number, record in enumerate(found):
            paths = exports.write(record, platform, out, f"{platform}-{number:03d}")
            truth.append({"files": [p.name for p in paths]} | exports.truth(record, platform))
            bar.update(number + 1)
        replace(out / "truth.json", (json.dumps(truth, indent=1) + "\n").encode())
    first = " ".join(str(out / name) for name in truth[0]["files"])
    print(f"{out}: {size} episodes as reports of {platform}, the truth in truth.json")
    print(f"try: trace-jax diagnose {first} --campaign {truth[0]['campaign']} --yes")
    return {"out": str(out), "platform": platform, "episodes": truth}
