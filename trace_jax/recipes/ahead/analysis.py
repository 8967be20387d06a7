"""Compiles programs and keeps what the compiler says of them, so that a program is compiled once a machine."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from trace_jax.recipes.ahead import hlo, hlo_bytes, hlo_flops
from trace_jax.recipes.ahead.hlo import Collective

_REFUSED = re.compile(r"[Uu]sed ([\d.]+)([KMGT])i?B? of ([\d.]+)([KMGT])i?B? hbm")
READER = 3  # of the programs' text; what another one read is not recalled
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program, bytes of one chip.

    Attributes:
        arguments, outputs: of which `aliased` are the same memory (donated).
        temporaries: everything in between, at its largest.
        code: the program itself.
        refused: what the program would need where the compiler gave up, None where it did not.
        limit: what the compiler takes the chip's memory to be, known where it gave up.
        traffic: read and written, see `hlo_bytes`; None without a program.
        counted_flops: by the compiler: bodies of loops once, kernels not at all.
        multiplied: FLOPs of matrix products, see `hlo_flops`; None without a program for the device.
        seconds: that compiling took (when it was compiled).
        collectives: see `hlo`.
    """

    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporaries: int = 0
    code: int = 0
    refused: float | None = None
    limit: float | None = None
    traffic: float | None = None
    counted_flops: float = 0.0
    multiplied: float | None = None
    seconds: float = 0.0
    collectives: tuple[Collective, ...] = ()

    @property
    def beside_arguments(self) -> float:
        """Bytes that the program needs besides its arguments."""
        if self.refused is not None:
            return self.refused
        return self.temporaries + max(self.outputs - self.aliased, 0) + self.code


def analyse(lowered: Any, mesh: Mapping[str, int], target: str, run: bool = True) -> Compiled:
    """Compiles a program, or recalls what was said of it.

    Args:
        lowered: `jax.stages.Lowered`.
        mesh: sizes by axis of the devices it runs on.
        target: names the devices.
        run: False where the compiler need not make fast code, only plan it.

    Raises:
        jax.errors.JaxRuntimeError: the compiler failed for another reason than memory.
    """
    kept = _place(lowered, target)
    if kept is not None and (known := _read(kept)) is not None:
        return known
    begun = time.perf_counter()
    try:
        compiled = lowered.compile(None if run else {"xla_backend_optimization_level": 0})
    except Exception as error:
        found = _REFUSED.search(str(error))
        if found is None:
            raise
        used, limit = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3))
        result = Compiled(refused=used, limit=limit, seconds=time.perf_counter() - begun)
    else:
        seconds, text, memory = time.perf_counter() - begun, compiled.as_text(), compiled.memory_analysis()
        costs = compiled.cost_analysis() or {}
        result = Compiled(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            code=memory.generated_code_size_in_bytes,
            traffic=hlo_bytes.traffic(text) if run else _least(memory),
            counted_flops=float(costs.get("flops", 0.0)),
            multiplied=hlo_flops.multiplied(text) if run else None,
            seconds=seconds,
            collectives=tuple(hlo.collectives(text, mesh)),
        )
        if kept is not None and os.environ.get("TRACE_JAX_KEEP_HLO"):
            with contextlib.suppress(OSError), gzip.open(kept.with_suffix(".hlo.gz"), "wt") as file:
                file.write(text)
    if kept is not None:
        with contextlib.suppress(OSError):
            partial = kept.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps({"reader": READER} | asdict(result)))
            partial.replace(kept)
    return result


def _least(memory: Any) -> float:
    """Traffic of a program whose instructions are not those of the device: what it is given and gives, and everything
    in between once written and read."""
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return float(given + 2 * memory.temp_size_in_bytes)


def _place(lowered: Any, target: str) -> Path | None:
    """Where what is said of a program is kept; it is a function of the program's text, the devices and versions."""
    with contextlib.suppress(OSError, RuntimeError):
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "trace-jax" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        versions = [_version(name) for name in ("jaxlib", "libtpu", "trace-jax")]
        key = hashlib.sha256("\n".join([target, *versions, lowered.as_text()]).encode()).hexdigest()[:32]
        return folder / f"{key}.json"
    return None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _read(path: Path) -> Compiled | None:
    """What is kept there; None for nothing, and for what cannot be read or was read by another `READER`."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        data = json.loads(path.read_text())
        if data.pop("reader") == READER:
            return Compiled(**data | {"collectives": tuple(Collective(**c) for c in data["collectives"])})
    return None
