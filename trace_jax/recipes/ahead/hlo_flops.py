"""Arithmetic of the matrix products of a compiled program, read from its HLO text, times the runs of each.

A configuration says what has to be multiplied, which a good program does and no more. Only the program shows where the
compiler does otherwise: a product of groups that it multiplies for all groups alike is seen neither in memory nor in
collectives. Kernels (custom calls) are not seen here.
"""

from __future__ import annotations

import math
import re

import numpy as np

from trace_jax.recipes.ahead.hlo import SHAPE, computations_of, opcode_of, operands_of, runs_of
from trace_jax.recipes.ahead.work import EXACT

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


def multiplied(text: str) -> float:
    """FLOPs (two for a product and its sum) of all matrix products and convolutions in one run of a program on one
    device; those of the highest precision as the six products of 16 bits that they are (`work.EXACT`). A loop whose end
    depends on data counts once."""
    computations, entry = computations_of(text)
    total = 0.0
    for name, (runs, _, _) in runs_of(computations, entry).items():
        if runs:
            total += runs * sum(_flops(rest, computations[name]) for _, rest in computations[name])
    return total


def _flops(rest: str, instructions: list[tuple[str, str]]) -> float:
    opcode = opcode_of(rest)
    if opcode not in ("dot", "convolution"):
        return 0.0
    shapes = dict(instructions)
    operands = [_sizes(shapes.get(name, "")) for name in operands_of(rest, opcode)]
    result = _sizes(rest)
    if result is None or len(operands) < 2 or None in operands[:2]:
        return 0.0
    left, right = operands[:2]
    times = 2.0 * EXACT if "highest" in rest else 2.0
    return times * (_product(rest, left, result) if opcode == "dot" else _convolution(rest, left, right, result))


def _product(rest: str, left: list[int], result: list[int]) -> float:
    found = _CONTRACTED.search(rest)
    summed = [left[int(d)] for d in found[1].split(",") if d] if found else []
    return float(math.prod(result) * math.prod(summed))


def _convolution(rest: str, left: list[int], right: list[int], result: list[int]) -> float:
    """Products of numbers, not of padding: TPU compilers write batched products as convolutions whose left side is
    dilated or padded so far that a window meets one number of it."""
    labels, window = _LABELS.search(rest), _WINDOW.search(rest)
    if labels is None:
        return 0.0
    parts = dict(part.split("=") for part in window[1].split() if "=" in part) if window else {}
    spatial = len(parts["size"].split("x")) if parts else 0

    def of(name: str, axis: int, default: int) -> int:
        return int(parts[name].split("x")[axis].split("_")[0]) if name in parts else default

    met = 1.0
    for axis in range(spatial):
        there, out = left[labels[1].index(str(axis))], result[labels[3].index(str(axis))]
        begin = np.arange(out)[:, None] * of("stride", axis, 1) - of("pad", axis, 0)
        at, apart = begin + np.arange(of("size", axis, 1)) * of("rhs_dilate", axis, 1), of("lhs_dilate", axis, 1)
        met *= np.sum((at >= 0) & (at <= (there - 1) * apart) & (at % apart == 0))
    rows, features = result[labels[3].index("b")], result[labels[3].index("f")]
    return float(met) * rows * features * right[labels[2].index("i")]


def _sizes(rest: str) -> list[int] | None:
    """Sizes of the array that an instruction gives; None for a tuple or nothing."""
    shape = SHAPE.match(rest)
    return [int(n) for n in shape[2].split(",") if n] if shape else None
