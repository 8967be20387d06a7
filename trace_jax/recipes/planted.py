"""`trace-jax reproduce planted-deficits`: does the contrast find what was taken out of a policy on purpose?

Every variant is an SFT policy whose teacher lacked something (`sft.without`); the contrast of its attempts should rank
the capability that goes with it first and keep no other. What the control of the same seed, whose teacher lacks
nothing, is found to lack are weaknesses of its own: a variant that has them, too, is not charged with them in the
second count.
Every run is an ordinary run directory; what is finished is not repeated.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_rules import require_environment
from trace_jax.policy.chat_files import tokenizer_files
from trace_jax.recipes import contrast, reproduce, study_place, train
from trace_jax.recipes.interrupt import Interrupted
from trace_jax.recipes.rundir import stored_config, write_text
from trace_jax.recipes.studies import PLANTED as NAME
from trace_jax.recipes.studies import PLANTED_CONTROL as CONTROL
from trace_jax.recipes.studies import PLANTED_SEEDS as SEEDS
from trace_jax.recipes.studies import PLANTED_VARIANTS as VARIANTS

COUNTS = ("first", "first_explained", "kept", "alone", "alone_beside_control")


def command(
    config: RunConfig, out: Path, *, seeds: Sequence[int] = SEEDS, variants: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs the study, or what is missing of it, and writes `table.json` and `table.md` into `out`.

    Args:
        config: of every run, but for `sft.without` and the seed.
        seeds: one policy of each variant for each.
        variants: names of those to run, the control is always one; empty: all.

    Returns:
        The content of `table.json`.

    Raises:
        ConfigError: bad input. Interrupted: everything is saved.
    """
    require_environment(config, "ads", NAME)
    chosen = _chosen(variants)
    if config.sft.without:
        raise ConfigError(f"`sft.without` is what the variants of {NAME} set: leave it out")
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, seeds))} names one twice: each is a run of its own")
    planned = {v: _config(config, v) for v in chosen}
    for seed in seeds:
        config_io.override(config, [("seed", str(seed))])
    train.check(config)
    out = study_place.claim(out, NAME)
    reproduce.keep_programs(out)
    found: dict[str, dict[int, dict[str, Any]]] = {v: {} for v in chosen}
    result: dict[str, Any] = {}
    count = len(seeds) * len(chosen)
    for number, (seed, variant) in enumerate((s, v) for s in seeds for v in chosen):
        print(f"{NAME}, run {number + 1} of {count}: {variant}, seed {seed}", flush=True)
        found[variant][seed] = _run(out, variant, seed, planned[variant].replace(seed=seed))
        # after every run: the table can be read before it is whole
        result = {"study": NAME, "runs": {v: r for v, r in found.items() if r}, "summary": summary(found)}
        write_text(out / "table.json", json.dumps(result, indent=1) + "\n")
        write_text(out / "table.md", markdown(result))
    print(markdown(result), end="")
    return result


def _chosen(variants: Sequence[str]) -> list[str]:
    for v in variants:
        if v not in VARIANTS:
            meant = config_io.nearest(v, VARIANTS)
            mend = f"did you mean {meant!r}?" if meant else f"choose from {', '.join(map(repr, VARIANTS))}"
            raise ConfigError(f"--variants {v!r}: {mend}")
    return [v for v in VARIANTS if not variants or v in variants or v == CONTROL]


def _config(config: RunConfig, variant: str) -> RunConfig:
    without = VARIANTS[variant][0]
    return config_io.override(config, [("sft.without", f"[{without}]")]) if without else config


def _run(out: Path, variant: str, seed: int, config: RunConfig) -> dict[str, Any]:
    """Trains and contrasts one policy, from wherever it stands."""
    path = out / reproduce.file_name(variant, seed)
    begun = (path / "config.yaml").exists()
    if begun and (changed := config_io.differences(stored_config(path), config)):
        raise ConfigError(
            f"{path} is of another study (`{changed[0]}` differs): give another --out, or the old settings"
        )
    if not begun:
        _share(out, variant, path)
    try:
        train.command("sft", path, config, resume=begun)
        result = contrast.command(path, config, stage="sft")
    except Interrupted as stop:
        raise Interrupted(stop.status) from None  # what continues is the command of the study
    planted = VARIANTS[variant][1]
    order = [e["capability"] for e in result["capabilities"]]
    entry = next((e for e in result["capabilities"] if e["capability"] == planted), None)
    return {
        "failed": result["failed"] / result["attempts"],
        "kept": result["kept"],
        "order": order,
        "gaps": {e["capability"]: e["mean_gap"] for e in result["capabilities"]},
        "coverages": {e["capability"]: e["coverage"]["value"] for e in result["capabilities"]},
        "rank": order.index(planted) + 1 if planted else None,
        "planted_kept": entry["kept"] if entry else None,
    }


def _share(out: Path, variant: str, path: Path) -> None:
    """Takes what does not depend on the seed from runs that have it: episodes from any, lessons and tokenizer from
    those of the same variant."""
    stem = reproduce.file_name(variant, 0)[:-1]
    for other in sorted(p.parent for p in out.glob("*/config.yaml")):
        reproduce.share_data(other, path)
        lessons = sorted((other / "data" / "teacher").glob("*.parquet"))
        same = other.name.removeprefix(stem).isdigit()
        if same and any((other / "checkpoints" / "sft").glob("[0-9]*")) and not (path / "data" / "teacher").exists():
            (path / "data" / "teacher").mkdir(parents=True)
            for file in lessons:
                shutil.copy(file, path / "data" / "teacher" / file.name)
            for name in tokenizer_files(other):
                shutil.copy(other / name, path / name)


def summary(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By variant with a planted deficit: in how many seeds it came first, was kept, and stood alone.

    `first` is by `capability.rank` of the runs, `first_explained` by Cov x gap whatever that is.
    `alone` counts seeds in which nothing else was kept, `alone_beside_control` those in which nothing else was kept
    that the control of the seed does not lack.
    """
    result = {}
    for variant, runs in found.items():
        planted = VARIANTS[variant][1]
        if not planted or not runs:
            continue
        others = {s: set(r["kept"]) - {planted} for s, r in runs.items()}
        own = {s: set(found[CONTROL][s]["kept"]) if s in found[CONTROL] else set() for s in runs}
        result[variant] = {
            "planted": planted,
            "seeds": len(runs),
            "first": sum(r["rank"] == 1 and r["planted_kept"] for r in runs.values()),
            "first_explained": sum(_explains_most(r, planted) for r in runs.values()),
            "kept": sum(r["planted_kept"] for r in runs.values()),
            "alone": sum(not o for o in others.values()),
            "alone_beside_control": sum(not (others[s] - own[s]) for s in runs),
            "gap": sum(r["gaps"][planted] for r in runs.values()) / len(runs),
            "coverage": sum(r["coverages"][planted] for r in runs.values()) / len(runs),
            "others": sorted(set().union(*others.values())),
        }
    return result


def _explains_most(run: Mapping[str, Any], planted: str) -> bool:
    """Whether a capability is kept and no other kept one has a larger Cov x gap."""
    share = {name: run["coverages"][name] * run["gaps"][name] for name in run["kept"]}
    return planted in share and share[planted] == max(share.values())


def markdown(result: Mapping[str, Any]) -> str:
    """The table for people."""
    lines = [
        "| | planted | Cov | gap | first | by Cov x gap | kept | nothing else | nothing that the control has not |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant, s in result["summary"].items():
        counts = " | ".join(f"{s[k]} of {s['seeds']}" for k in COUNTS)
        lines.append(f"| {variant} | {s['planted']} | {s['coverage']:.2f} | {s['gap']:+.2f} | {counts} |")
    control = result["runs"].get(CONTROL, {})
    own = sorted(set().union(*(r["kept"] for r in control.values())))
    lines.append(f"\nThe control's own weaknesses, in any seed: {', '.join(own) or 'none'}.\n")
    return "\n".join(lines)
