"""Memory traffic of a compiled program: what the instructions outside fusions read and write, times their runs.

An array that an instruction only slices counts as the slice, one that it updates in place as the update. What stays in
a core's own memory (layouts with `S(1)` on TPU) is no traffic. Kernels count once what they are given and give, so
blocks that a kernel reads again are missing: a lower bound, as a roofline needs it.
"""

from __future__ import annotations

import re

from trace_jax.recipes.ahead.hlo import SHAPE, called, computations_of, opcode_of, operands_of, runs_of, shape_bytes

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "iota", "opt-barrier", "add-dependency", "copy-start", "domain",
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}


def traffic(text: str) -> float:
    """Bytes that one device reads and writes in its memory in one run of a program."""
    computations, entry = computations_of(text)
    fused = {
        name
        for instructions in computations.values()
        for _, rest in instructions
        if opcode_of(rest)
        in ("fusion", "reduce", "sort", "scatter", "map", "all-reduce", "reduce-scatter", "reduce-window")
        for name in called(rest)
    }
    total = 0.0
    for name, (runs, _, _) in runs_of(computations, entry).items():
        if runs and name not in fused:
            total += runs * _of(computations[name], computations)
    return total


def _of(instructions, computations) -> float:
    shapes = {name: _type(rest) for name, rest in instructions}
    total = 0.0
    for name, rest in instructions:
        opcode = opcode_of(rest)
        if opcode is None or opcode in _FREE or opcode.endswith("-done"):
            continue
        operands = [shapes.get(n, "") for n in operands_of(rest, opcode)]
        result = _outside(shapes[name])
        if opcode in _SLICES:
            total += 2 * result
        elif opcode == "dynamic-update-slice":
            total += 2 * (_outside(operands[1]) if len(operands) > 1 else result)
        elif opcode == "fusion" and (inner := called(rest)) and inner[0] in computations:
            total += _fusion(computations[inner[0]], operands, result)
        else:
            total += result + sum(map(_outside, operands))
    return total


def _fusion(instructions, operands: list[str], result: float) -> float:
    """Traffic of a fusion: of an operand that is only sliced, the slices; of one that is updated, the update."""
    uses: dict[str, list[tuple[str, int, str]]] = {}
    numbers: dict[str, int] = {}
    types = {name: _type(rest) for name, rest in instructions}
    for name, rest in instructions:
        opcode = opcode_of(rest)
        if opcode == "parameter":
            numbers[name] = int(re.search(r"parameter\((\d+)\)", rest)[1])
        elif opcode is not None:
            for place, used in enumerate(operands_of(rest, opcode)):
                uses.setdefault(used, []).append((opcode, place, name))
    total = result
    for parameter, number in numbers.items():
        whole = _outside(operands[number]) if number < len(operands) else 0.0
        how = uses.get(parameter, [])
        if how and all(opcode in _SLICES and place == 0 for opcode, place, _ in how):
            whole = min(whole, sum(shape_bytes(types[name]) for _, _, name in how))
        elif how and all(opcode == "dynamic-update-slice" and place == 0 for opcode, place, _ in how):
            # read and written in place: neither the operand nor the result is traffic, the update is
            size = shape_bytes(types[parameter])
            updates = [
                operands_of(rest, "dynamic-update-slice")[1] for n, rest in instructions if n in {u[2] for u in how}
            ]
            total -= min(size, total)
            whole = sum(2 * shape_bytes(types.get(u, "")) for u in updates)
        total += whole
    return total


def _type(rest: str) -> str:
    opcode = opcode_of(rest)
    return rest[: rest.index(f" {opcode}(")] if opcode else rest


def _outside(shape: str) -> float:
    """Bytes of the arrays of a type that lie in the device's main memory."""
    total, ends = 0.0, [m.start() for m in SHAPE.finditer(shape)] + [len(shape)]
    for start, end in zip(ends, ends[1:], strict=False):
        part = shape[start:end]
        total += 0.0 if "S(1)" in part else shape_bytes(part)
    return total
