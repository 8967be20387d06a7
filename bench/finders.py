"""Slice finders on the synthetic tables that RiskLoc's paper tests finders on (arXiv 2205.10004).

    python bench/finders.py --instances 300 --out bench/results/finders-DATE

Writes OUT.json and OUT.md. A table has a forecast and an actual value for every leaf. The generator follows the
description of the paper's sets S and L and is our own, so its tables are other draws from the same distribution: sizes
of leaves are Weibull, some are zero, forecasts are off by Gaussian noise on either side; then a few anomalies, each a
few elements of one set of attributes, lose a share of their value. The paper's third set, H, has 24 million leaves a
table and is left out.

Scores are the paper's: an element counts when it is named exactly; precision, recall and F1 over all elements of a set.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.evaluation.finders import adtributor, riskloc, squeeze
from trace_jax.evaluation.finders.leaves import Element, Leaves

SEED = 2205
RESAMPLES = 2000
_TRIES = 1000  # draws of an anomaly's place before the instance is given up
Range = tuple[float, float]


@dataclass(frozen=True)
class Recipe:
    """How tables of a set are drawn; ranges are uniform, one draw for a table or for an anomaly.

    Attributes:
        sizes: values of each attribute.
        noise: of a table, standard deviation of the forecast's relative error.
        severity, deviation: of an anomaly, mean share of the value that is lost, the noise on top, and its standard
            deviation between leaves.
        anomalies: in a table. elements: of an anomaly.
        leaves_only: anomalies are single leaves; otherwise they fix any number of attributes.
        shape: of the Weibull distribution. zeros: share of leaves without a value.
    """

    sizes: tuple[int, ...]
    noise: Range = (0.0, 0.25)
    severity: Range = (0.2, 1.0)
    deviation: Range = (0.0, 0.1)
    anomalies: tuple[int, int] = (1, 3)
    elements: tuple[int, int] = (1, 3)
    leaves_only: bool = False
    shape: Range = (0.5, 1.0)
    zeros: Range = (0.0, 0.25)


SETS = {
    "S": Recipe((10, 12, 10, 8, 5)),
    "L": Recipe(
        (10, 24, 10, 15),
        noise=(0.0, 0.1),
        severity=(0.5, 1.0),
        deviation=(0.0, 0.0),
        anomalies=(1, 5),
        elements=(1, 1),
        leaves_only=True,
    ),
}


def instance(recipe: Recipe, seed: tuple[int, ...]) -> tuple[Leaves, frozenset[Element]]:
    """A table and the elements that are to be found in it, a function of `seed`."""
    rng = np.random.default_rng(seed)
    codes = np.stack([x.reshape(-1) for x in np.meshgrid(*map(np.arange, recipe.sizes), indexing="ij")], 1)
    noise, zeros = rng.uniform(*recipe.noise), rng.uniform(*recipe.zeros)
    one = 100.0 * rng.weibull(rng.uniform(*recipe.shape), len(codes)) * (rng.random(len(codes)) >= zeros)
    other = np.maximum(one * rng.normal(1.0, noise, len(codes)), 0.0)
    swap = rng.random(len(codes)) < 0.5  # the noise is on both sides
    values = np.where(swap, [other, one], [one, other])
    # Anomalies pull the way in which the noise happens to pull, so that it does not hide them.
    low = 1 if values[0].sum() >= values[1].sum() else 0
    placed: list[tuple[Element, ...]] = []
    for _ in range(rng.integers(*recipe.anomalies, endpoint=True)):
        placed.append(_place(recipe, codes, values, placed, rng))
        inside = np.any([_inside(codes, element) for element in placed[-1]], axis=0)
        lost = rng.uniform(*recipe.severity) + noise
        share = rng.normal(lost, rng.uniform(*recipe.deviation), int(inside.sum()))
        values[low, inside] = values[1 - low, inside] * np.maximum(1.0 - share, 0.0)
    return Leaves.plain(codes, *values), frozenset(element for anomaly in placed for element in anomaly)


def _inside(codes: np.ndarray, element: Element) -> np.ndarray:
    return (codes[:, element.attributes] == element.codes).all(1)


def _place(
    recipe: Recipe, codes: np.ndarray, values: np.ndarray, placed: list[tuple[Element, ...]], rng: np.random.Generator
) -> tuple[Element, ...]:
    """Elements of one anomaly: of a set of attributes of its own, without values that another anomaly uses, and, where
    they are single leaves, not of leaves without a value."""
    count = len(recipe.sizes)
    wanted = int(rng.integers(*recipe.elements, endpoint=True))
    for _ in range(_TRIES):
        layer = count if recipe.leaves_only else int(rng.integers(1, count, endpoint=True))
        attributes = tuple(sorted(rng.choice(count, layer, replace=False).tolist()))
        if layer < count and any(attributes == anomaly[0].attributes for anomaly in placed):
            continue
        used = {(a, c) for anomaly in placed for e in anomaly for a, c in zip(e.attributes, e.codes, strict=True)}
        free = [[c for c in range(recipe.sizes[a]) if (a, c) not in used] for a in attributes]
        if not all(free):
            continue
        chosen = {tuple(int(rng.choice(x)) for x in free) for _ in range(wanted)}
        anomaly = tuple(Element(attributes, c) for c in sorted(chosen))
        empty = layer == count and any(values[:, _inside(codes, e)].min() <= 0 for e in anomaly)
        if len(anomaly) == wanted and not empty:
            return anomaly
    raise ValueError(f"no place for an anomaly of {wanted} elements in {_TRIES} draws")


def _adtributor(leaves: Leaves) -> set[Element]:
    found = adtributor.candidates(leaves, ratio=False)
    return set(found[0].elements) if found else set()


def _squeeze(leaves: Leaves) -> set[Element]:
    return {element for cause in squeeze.localise(leaves, leaves.codes.shape[1]) for element in cause}


def _riskloc(leaves: Leaves) -> set[Element]:
    return set(riskloc.localise(leaves, layers=leaves.codes.shape[1]))


FINDERS: dict[str, Callable[[Leaves], set[Element]]] = {
    "adtributor": _adtributor,
    "squeeze": _squeeze,
    "riskloc": _riskloc,
}


def counts(found: set[Element], truth: frozenset[Element]) -> tuple[int, int, int]:
    """Elements that are right, named but wrong, and missed."""
    right = len(found & truth)
    return right, len(found) - right, len(truth) - right


def scores(rows: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """F1, precision and recall over all tables of [N, 3] counts, F1 with a 95 % bootstrap interval over tables."""

    def f1(total: np.ndarray) -> np.ndarray:
        return 2 * total[..., 0] / np.maximum(2 * total[..., 0] + total[..., 1] + total[..., 2], 1)

    total = rows.sum(0)
    drawn = np.random.default_rng(seed).integers(len(rows), size=(RESAMPLES, len(rows)))
    low, high = np.quantile(f1(rows[drawn].sum(1)), (0.025, 0.975))
    return {
        "f1": {"value": float(f1(total)), "low": float(low), "high": float(high)},
        "precision": float(total[0] / max(total[0] + total[1], 1)),
        "recall": float(total[0] / max(total[0] + total[2], 1)),
    }


def measure(name: str, instances: int, report: Callable[[int], Any] = lambda done: None) -> dict[str, Any]:
    """All finders on the first tables of a set."""
    rows: dict[str, list[tuple[int, int, int]]] = {finder: [] for finder in FINDERS}
    seconds = dict.fromkeys(FINDERS, 0.0)
    for i in range(instances):
        leaves, truth = instance(SETS[name], (SEED, ord(name), i))
        for finder, run in FINDERS.items():
            started = time.perf_counter()
            rows[finder].append(counts(run(leaves), truth))
            seconds[finder] += time.perf_counter() - started
        report(i + 1)
    return {
        finder: {**scores(np.array(rows[finder])), "seconds": round(seconds[finder] / instances, 3)}
        for finder in FINDERS
    }


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# Slice finders on RiskLoc's synthetic tables, {result['date']}",
        "",
        f"`python bench/finders.py --instances {result['instances']}`; seed {SEED}; brackets: 95 % bootstrap interval "
        "over tables; seconds: of a table, on the machine it ran on.",
        "",
        "| set | finder | F1 | precision | recall | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name, finders in result["sets"].items():
        for finder, r in finders.items():
            f1 = "{value:.3f} [{low:.3f}, {high:.3f}]".format(**r["f1"])
            lines.append(f"| {name} | {finder} | {f1} | {r['precision']:.3f} | {r['recall']:.3f} | {r['seconds']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=300, help="tables of each set (the paper: 1,000)")
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    args = parser.parse_args()
    if args.instances < 1:
        parser.error(f"--instances {args.instances}: take at least 1")

    if args.out:
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out {args.out}: its folder cannot be made ({error.strerror}), choose another one")

    def progress(name: str) -> Callable[[int], Any]:
        return lambda done: print(f"\r{name}: {done}/{args.instances}", end="", file=sys.stderr, flush=True)

    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "instances": args.instances,
        "seed": SEED,
        "sets": {name: measure(name, args.instances, progress(name)) for name in SETS},
    }
    print(file=sys.stderr)
    print(markdown(result))
    if args.out:
        for suffix, text in ((".json", json.dumps(result, indent=1) + "\n"), (".md", markdown(result))):
            args.out.with_name(args.out.name + suffix).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
