"""safetensors files: read without loading them, written tensor by tensor.

A file is 8 bytes (length of the header, little endian), a JSON header (name -> dtype, shape, place), and the data.
Arrays are memory maps, so a checkpoint larger than the machine's memory can be read piece by piece; bfloat16 is that of
`ml_dtypes`, which the NumPy reader of `safetensors` lacks.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trace_jax.config import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, Any] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
SHORT = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # types that are written
METADATA = {"format": "pt", "producer": "trace-jax"}  # of files that are written here
_NUMBERS = 2**20  # that are looked at together
_LONGEST_HEADER = 100 * 2**20  # that `safetensors` reads
# How JSON that is cut off, too deep, or of another form than expected shows itself.
BROKEN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Entry(NamedTuple):
    """A tensor of a file: its type as safetensors names it, its shape, and where its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


class SafetensorFiles:
    """The tensors of a checkpoint directory: those of model.safetensors, of the files of an index, or of all files."""

    def __init__(self, directory: Path):
        """
        Raises:
            ConfigError: a file is missing or damaged, or there is none; two files hold one tensor.
        """
        self.where = Path(directory)
        self.entries: dict[str, Entry] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for path in _files(self.where):
            for name, entry in _header(path).items():
                if name in self.entries:
                    raise ConfigError(
                        f"import: tensor {name!r} is in {self.entries[name].file.name} and {path.name}: delete one"
                    )
                self.entries[name] = entry

    def array(self, name: str) -> np.ndarray:
        """A tensor, read from its file as it is used."""
        entry = self.entries[name]
        if entry.file not in self._maps:
            with open(entry.file, "rb") as file:
                self._maps[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = memoryview(self._maps[entry.file])[entry.begin : entry.end]
        return np.frombuffer(data, DTYPES[entry.dtype]).reshape(entry.shape)


def _files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    index = directory / INDEX
    if not index.is_file():
        if found := sorted(directory.glob("*.safetensors")):
            return found
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt*"))
        mend = "save it again as safetensors, the only kind read" if pickled else "copy the weights there"
        raise ConfigError(f"import: {directory} has no *.safetensors: {mend}")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if any(name != Path(name).name for name in names):
            raise ValueError("a file elsewhere")
        paths = [directory / name for name in names]
    except (OSError, *BROKEN) as error:
        raise ConfigError(f"import: {index} is damaged or cannot be read: copy it again") from error
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"import: {path} is missing, {INDEX} names it: copy it there")
    return paths


def _header(path: Path) -> dict[str, Entry]:
    """The tensors of a file.

    Raises:
        ConfigError: it cannot be read, or is damaged.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise ValueError("cut off, or no safetensors file")
            header = json.loads(file.read(length))
        entries = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            places, shape = entry["data_offsets"], tuple(entry["shape"])
            if len(places) != 2 or not all(type(n) is int and n >= 0 for n in (*places, *shape)):
                raise TypeError(name)
            begin, stop = places
            dtype = DTYPES.get(entry["dtype"])
            if begin > stop or (dtype and math.prod(shape) * dtype.itemsize != stop - begin):
                raise ValueError(f"the size of {name} does not fit its shape")
            entries[name] = Entry(str(entry["dtype"]), shape, path, 8 + length + begin, 8 + length + stop)
        end = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: item[1][3:]):
            if entry.begin != end:
                raise ValueError(f"{name} does not begin where the tensor before it ends")
            end = entry.end
        if end != size:
            raise ValueError(f"cut off at {size} of {end} bytes" if end > size else f"{size - end} bytes too many")
    except OSError as error:
        raise ConfigError(f"import: cannot read {path}: {error.strerror}") from error
    except BROKEN as error:
        what = str(error) if type(error) is ValueError else "its header cannot be read"
        raise ConfigError(f"import: {path} is damaged ({what}): copy it again") from error
    return entries


class Planned(NamedTuple):
    """A tensor that is to be written: type as safetensors names it, shape, and what makes it."""

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write(path: Path, tensors: Mapping[str, Planned], check: Callable[[], None] = lambda: None) -> None:
    """Writes one file; at any time one tensor is in memory.

    Args:
        check: called before every tensor; what it raises ends the work.

    Raises:
        OSError: it cannot be written.
    """
    # Larger types first keeps all of them aligned.
    order = sorted(tensors, key=lambda name: -DTYPES[tensors[name].dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for name in order:
        tensor = tensors[name]
        places = [end, end := end + tensor.size]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": places}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            check()
            array = np.ascontiguousarray(tensors[name].make(), DTYPES[tensors[name].dtype])
            file.write(array.reshape(-1).view(np.uint8).data)


def is_ours(path: Path) -> bool:
    """Whether `write` made a file."""
    with contextlib.suppress(OSError, *BROKEN), open(path, "rb") as file:
        length = min(int.from_bytes(file.read(8), "little"), _LONGEST_HEADER)
        return json.loads(file.read(length))["__metadata__"] == METADATA
    return False


def shards(tensors: Mapping[str, Planned], largest: int) -> dict[str, dict[str, Planned]]:
    """The files that tensors go into, in their order: as many to a file as `largest` bytes hold, at least one."""
    groups: list[dict[str, Planned]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.size > largest:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.size
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def index(files: Mapping[str, Mapping[str, Planned]]) -> dict[str, Any]:
    """The content of `INDEX` for these files."""
    total = sum(tensor.size for group in files.values() for tensor in group.values())
    return {"metadata": {"total_size": total}, "weight_map": {n: file for file, group in files.items() for n in group}}


def is_weights(name: str) -> bool:
    """Whether a file's name is one that `shards` or `index` gives."""
    return name in (WEIGHTS, INDEX) or (name.startswith("model-") and name.endswith(".safetensors"))


def is_finite(array: np.ndarray) -> bool:
    """Whether no number is NaN or infinite; looked at in parts, so that little memory is needed."""
    flat = array.reshape(-1)
    return all(np.isfinite(flat[i : i + _NUMBERS]).all() for i in range(0, flat.size, _NUMBERS))


def common(names: Iterable[str]) -> str:
    """The most frequent of some types."""
    names = list(names)
    return max(sorted(set(names)), key=names.count)
