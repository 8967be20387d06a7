"""Memory traffic of a compiled program: what the instructions outside fusions read and write, times their runs.

An array that an instruction only slices counts as the slice, one that it updates in place as the update; both are
looked for inside fusions, and the fusions in them: a loop over the chunks of an array reads one of them a run, not the
array. What stays in a core's own memory (layouts with `S(1)` on TPU) is no traffic. Kernels count once what they are
given and give, so blocks that a kernel reads again are missing: a lower bound, as a roofline needs it.
"""

from __future__ import annotations

import re

from trace_jax.recipes.ahead.hlo import SHAPE, called, computations_of, opcode_of, operands_of, runs_of, shape_bytes

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "iota", "opt-barrier", "add-dependency", "copy-start", "domain",
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}
_SAME = {"bitcast", "reshape"}  # the same bytes under another shape


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
            total += _fusion(inner[0], computations, operands, shapes[name])
        else:
            total += result + sum(map(_outside, operands))
    return total


def _fusion(name: str, computations, operands: list[str], result: str) -> float:
    """Traffic of a fusion: of an operand that is only sliced, the slices; of one that is updated in place, the update.

    Args:
        name: of the fused computation.
        operands, result: types where the fusion stands: what lies in a core's own memory is known only there.
    """
    inner = _Fused(computations[name], computations)
    read = sum(
        min(_outside(operands[number]), inner.read(parameter))
        for parameter, number in inner.numbers.items()
        if number < len(operands)
    )
    return read + min(_outside(result), inner.written())


class _Fused:
    """A fused computation."""

    def __init__(self, instructions, computations):
        self._computations = computations
        self._rest = dict(instructions)
        self._types = {name: _type(rest) for name, rest in instructions}
        self._uses: dict[str, list[tuple[str, int]]] = {}
        self.numbers: dict[str, int] = {}
        self._root = instructions[-1][0]
        for name, rest in instructions:
            opcode = opcode_of(rest)
            if opcode == "parameter":
                self.numbers[name] = int(re.search(r"parameter\((\d+)\)", rest)[1])
            elif opcode is not None:
                for place, used in enumerate(operands_of(rest, opcode)):
                    self._uses.setdefault(used, []).append((name, place))

    def read(self, name: str) -> float:
        """Bytes of an array in it that are looked at."""
        whole, total = shape_bytes(self._types[name]), 0.0
        for user, place in self._uses.get(name, []):
            rest = self._rest[user]
            opcode = opcode_of(rest)
            if opcode in _SAME:
                total += self.read(user)
            elif opcode in _SLICES and place == 0:
                total += shape_bytes(self._types[user])
            elif opcode == "fusion" and (inner := self._inner(rest)) is not None:
                parameter = next((p for p, number in inner.numbers.items() if number == place), None)
                total += whole if parameter is None else inner.read(parameter)
            elif opcode != "dynamic-update-slice" or place != 0:
                total += whole
        return min(whole, total)

    def written(self, name: str | None = None) -> float:
        """Bytes of a result of it (its root) that are written: an update in place is as large as what is new."""
        name = self._root if name is None else name
        rest = self._rest[name]
        opcode = opcode_of(rest)
        if opcode in _SAME:
            return self.written(operands_of(rest, opcode)[0])
        if opcode == "tuple":
            return sum(self.written(part) for part in operands_of(rest, opcode))
        if opcode == "dynamic-update-slice" and self._given(operands_of(rest, opcode)[0]):
            return shape_bytes(self._types.get(operands_of(rest, opcode)[1], ""))
        if opcode == "fusion" and (inner := self._inner(rest)) is not None:
            return inner.written()
        return shape_bytes(self._types[name])

    def _given(self, name: str) -> bool:
        """Whether an array is a parameter, seen through what changes nothing."""
        while (opcode := opcode_of(self._rest.get(name, ""))) in _SAME:
            name = operands_of(self._rest[name], opcode)[0]
        return name in self.numbers

    def _inner(self, rest: str) -> _Fused | None:
        found = called(rest)
        return _Fused(self._computations[found[0]], self._computations) if found[0] in self._computations else None


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
