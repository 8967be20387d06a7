"""Collectives of a compiled program, read from its HLO text: kind, size, mesh axes, how often they run.

The compiler's own counts see the body of a loop once. Here every computation gets the number of times it runs: a loop's
body as often as the text says (`known_trip_count`, or the constant that its condition compares a counter with), times
the runs of the computation around it. A loop whose end depends on data is counted once, and its collectives are listed
as such. Of a conditional every branch is counted, which is an upper bound.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$|^(ENTRY )?%?([\w.\-]+) \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
SHAPE = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count["\s:={]+n["\s:=]+(\d+)')
_CONSTANT = re.compile(r"[su]32\[\][^=]* constant\((\d+)\)")
_LISTED = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\})")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}")
_ORIGIN = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Collective:
    """One instruction.

    Attributes:
        kind: one of `KINDS`.
        axes: mesh axes that its groups span, joined by "+"; "" for groups of one device.
        ways: devices of a group.
        bytes: of the whole array that the group shares: what a gather gives, what a reduction is given.
        moved: bytes that a device receives in one run of a ring or its equal.
        runs: how often it runs in the program.
        known: whether all loops around it have a known count.
        in_loop: whether there is a loop around it.
        origin: the operation it was made for.
    """

    kind: str
    axes: str
    ways: int
    bytes: float
    moved: float
    runs: int
    known: bool
    in_loop: bool
    origin: str


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """All collectives of a program.

    Args:
        text: of `jax.stages.Compiled.as_text()`.
        mesh: sizes by axis, in the order of the devices.
    """
    computations, entry = computations_of(text)
    found, seen = [], set()
    fused_in = _fused(computations)
    for name, (runs, known, in_loop) in runs_of(computations, entry).items():
        sizes = {}
        for instruction, rest in computations[name]:
            opcode = opcode_of(rest)
            sizes[instruction] = shape_bytes(rest[: rest.index(f" {opcode}(")] if opcode else rest)
            kind = (opcode or "").removesuffix("-start")
            if kind not in KINDS or not runs:
                continue
            if name in fused_in:  # TPU: the start, the middle and the end of one collective are fusions that name it
                channel = (fused_in[name], kind, *re.findall(r"channel_id=(\d+)", rest))
                if channel in seen:
                    continue
                seen.add(channel)
            operands = sum(sizes.get(n, 0.0) for n in operands_of(rest, opcode))
            operands = operands or sizes[instruction]
            axes, ways = _group(rest, mesh)
            whole, moved = _moved(kind, operands, ways)
            origin = _ORIGIN.search(rest)
            found.append(Collective(kind, axes, ways, whole, moved, runs, known, in_loop, origin[1] if origin else ""))
    return [c for c in found if c.ways > 1]


def by_axis(found: Sequence[Collective]) -> dict[str, dict[str, float]]:
    """Bytes that a device receives over each group of axes, by kind."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for c in found:
        sums[c.axes][c.kind] += c.moved * c.runs
    return {axes: dict(kinds) for axes, kinds in sorted(sums.items())}


def computations_of(text: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """Instructions (name, the rest of the line) of every computation, and the name of the first one to run."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] | None = None
    entry = ""
    for line in text.splitlines():
        if current is None:
            if line.endswith("{") and not line.startswith(("HloModule", " ")) and (m := _COMPUTATION.match(line)):
                name = m[2] or m[4]
                current = found.setdefault(name, [])
                entry = name if m[1] or m[3] else entry
        elif line.rstrip() == "}":  # a kernel's attributes may have lines of their own that begin so
            current = None
        elif m := _INSTRUCTION.match(line):
            current.append((m[1], m[2]))
    return found, entry


def _fused(computations) -> dict[str, str]:
    """Computations of fusions, with the computation that each is used in."""
    return {
        inner: name
        for name, instructions in computations.items()
        for _, rest in instructions
        if opcode_of(rest) == "fusion"
        for inner in called(rest)
    }


def runs_of(computations, entry: str) -> dict[str, tuple[int, bool, bool]]:
    """How often each computation runs, whether that is known, and whether it is inside a loop."""
    edges: dict[str, list[tuple[str, int | None, bool]]] = {}
    for name, instructions in computations.items():
        edges[name] = out = []
        for _, rest in instructions:
            opcode = opcode_of(rest)
            if opcode in ("async-update", "async-done"):
                continue  # the computation was counted where it was started
            trips = _trips(rest, computations) if opcode == "while" else 1
            out += [(c, trips, opcode == "while") for c in called(rest) if c in computations]
    order: list[str] = []
    seen: set[str] = set()

    def visit(name):
        if name not in seen:
            seen.add(name)
            for inner, _, _ in edges[name]:
                visit(inner)
            order.append(name)

    visit(entry)
    counts = {name: (0, True, False) for name in order}
    counts[entry] = (1, True, False)
    for name in reversed(order):  # callers before what they call
        runs, known, in_loop = counts[name]
        for inner, trips, loop in edges[name]:
            before, sure, inside = counts[inner]
            counts[inner] = (
                before + runs * (1 if trips is None else trips),
                sure and known and trips is not None,
                inside or in_loop or loop,
            )
    return counts


def called(rest: str) -> list[str]:
    """Computations that an instruction runs."""
    found = _CALLED.findall(rest)
    for listed in _BRANCHES.findall(rest):
        found += [name.strip().lstrip("%") for name in listed.split(",")]
    return found


def _trips(rest: str, computations) -> int | None:
    """How often the body of a loop runs; None where no constant says so. The counter begins at 0."""
    if m := _TRIPS.search(rest):
        return int(m[1])
    condition, body = (re.search(rf"{part}=%?([\w.\-]+)", rest) for part in ("condition", "body"))
    lines = computations.get(condition[1], []) if condition else []
    constants = [int(m[1]) for _, line in lines if (m := _CONSTANT.search(line))]
    if len(constants) != 1:
        return None
    indices = [int(m[1]) for _, line in lines if (m := re.search(r"get-tuple-element\(.*index=(\d+)", line))]
    step = _step(computations.get(body[1], []), indices[0]) if body and len(indices) == 1 else 1
    return -(-constants[0] // step)


def _step(body: list[tuple[str, str]], index: int) -> int:
    """By how much a loop's counter grows in a turn: more than 1 in a body that the compiler unrolled."""
    defined = dict(body)
    if not body or opcode_of(body[-1][1]) != "tuple":
        return 1
    name, total = operands_of(body[-1][1], "tuple")[index], 0
    while opcode_of(defined.get(name, "")) == "add":
        names = operands_of(defined[name], "add")
        constants = [int(m[1]) for n in names if (m := _CONSTANT.search(defined.get(n, "")))]
        others = [n for n in names if not _CONSTANT.search(defined.get(n, ""))]
        if len(constants) != 1:
            return 1
        total, name = total + constants[0], others[0]
    return max(total, 1)


def opcode_of(rest: str) -> str | None:
    """Name of the operation of an instruction."""
    m = _OPCODE.search(rest)
    return m[1] if m else None


def operands_of(rest: str, opcode: str) -> list[str]:
    """Names of the instructions whose results it takes."""
    start = rest.index(f" {opcode}(") + len(opcode) + 2
    depth, end = 1, start
    while depth and end < len(rest):
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        end += 1
    return re.findall(r"%([\w.\-]+)", rest[start : end - 1])


def shape_bytes(shape: str) -> float:
    """Bytes of all arrays that a type names."""
    total = 0.0
    for kind, sizes in SHAPE.findall(shape):
        digits = re.search(r"\d+", kind)
        width = _BYTES.get(kind, int(digits[0]) / 8 if digits else 0)
        total += width * math.prod(int(n) for n in sizes.split(",") if n)
    return total


def _moved(kind: str, operands: float, ways: int) -> tuple[float, float]:
    """Bytes of the whole array and bytes that a device receives."""
    share = (ways - 1) / ways
    return {
        "all-gather": (operands * ways, operands * (ways - 1)),
        "reduce-scatter": (operands, operands * share),
        "all-reduce": (operands, 2 * operands * share),
        "all-to-all": (operands, operands * share),
        "collective-permute": (operands, operands),
    }[kind]


def _group(rest: str, mesh: Mapping[str, int]) -> tuple[str, int]:
    """Mesh axes along which the devices of a group differ, and their number."""
    names, shape = list(mesh), tuple(mesh.values())
    if m := _PAIRS.search(rest):
        pairs = np.array([[int(n) for n in p.split(",")] for p in re.findall(r"\{([\d,]+)\}", m[1])])
        moves = pairs[pairs[:, 0] != pairs[:, 1]]
        if not len(moves):
            return "", 1
        there, back = (np.array(np.unravel_index(moves[:, i], shape)) for i in (0, 1))
        return "+".join(n for n, d in zip(names, (there != back).any(axis=1), strict=True) if d), 2
    groups = _groups(rest, math.prod(shape))
    places = np.array(np.unravel_index(np.array(groups), shape))  # axes, groups, members
    varies = (places != places[:, :, :1]).any(axis=(1, 2))
    return "+".join(n for n, v in zip(names, varies, strict=True) if v), len(groups[0])


def _groups(rest: str, count: int) -> list[list[int]]:
    """Devices of each group, in any of the ways the text names them: a list, a reshaped range, axes of a mesh that the
    compiler made (whose names say nothing of ours)."""
    if m := _MESH.search(rest):
        return _along(m[1], m[2], m[3])
    if m := _IOTA.search(rest):
        return _reshaped(m[2], m[3]).reshape([int(n) for n in m[1].split(",")]).tolist()
    m = _LISTED.search(rest)
    if m is None or m[1] == "{}":
        return [list(range(count))]
    return [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", m[1])]


def _reshaped(shape: str, order: str | None) -> np.ndarray:
    """A range of devices in a shape, its axes in another order."""
    sizes = [int(n) for n in shape.split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids if not order else ids.transpose([int(n) for n in order.split(",")])


def _along(mesh: str, devices: str | None, chosen: str) -> list[list[int]]:
    """Groups along some axes of a mesh, or along a part (`:(before)size`) of one."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    ids = np.arange(math.prod(sizes.values()))
    if devices and (m := re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", devices)):
        ids = _reshaped(m[1], m[2])
    elif devices:
        ids = np.array([int(n) for n in re.findall(r"\d+", devices)])
    parts: dict[str, tuple[int, int]] = {}
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen):
        parts[name] = (int(before), int(size)) if size else (1, sizes[name])
    shape, inside = [], []
    for name, size in sizes.items():
        before, part = parts.get(name, (size, 1))
        inside += [len(shape) + 1] if name in parts else []
        shape += [before, part, size // before // part]
    order = [i for i in range(len(shape)) if i not in inside] + inside
    ways = math.prod(shape[i] for i in inside)
    return ids.reshape(shape).transpose(order).reshape(-1, ways).tolist()
