"""The files of checkpoints: names, manifest, fingerprints; what is complete and what is not. See `checkpoint`."""

from __future__ import annotations

import json
import math
import shutil
import warnings
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from etils import epath

from trace_jax.config import ConfigError

MANIFEST = "checkpoint.json"
PARTIAL = ".partial-"
FILES = "files"
FORMAT = 1


class Folder:
    """A directory of checkpoints. Reads any; deletes what it is told to."""

    def __init__(self, directory: epath.Path):
        self.directory = directory

    def path(self, step: int) -> epath.Path:
        """Where the checkpoint of a step is, whether or not it exists."""
        return self.directory / f"{step:08d}"

    def partial(self, step: int) -> epath.Path:
        """Where it is while it is being written."""
        return self.directory / f"{PARTIAL}{step:08d}"

    def entries(self) -> list[epath.Path]:
        """Everything in the directory; `ConfigError` when it cannot be listed."""
        try:
            return list(self.directory.iterdir()) if self.directory.exists() else []
        except OSError as error:
            raise ConfigError(
                f"checkpoints in {self.directory} cannot be listed ({one_line(error)}): "
                "it must be a readable directory; move what is there away or mend its permissions"
            ) from error

    def complete(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        steps = sorted({int(p.name) for p in self.entries() if _is_step(p.name)})
        return [s for s in steps if self._is_complete(self.path(s))]

    def warn_of_incomplete(self, complete: Iterable[int]) -> None:
        """One warning for each checkpoint that is skipped."""
        whole = {self.path(s).name for s in complete}
        for path in sorted(self.entries()):
            partial = path.name.startswith(PARTIAL)
            if partial or (_is_step(path.name) and path.name not in whole):
                why = "its save did not finish" if partial else "files of it are missing or not as they were saved"
                warnings.warn(f"skipping incomplete checkpoint {path}: {why}", stacklevel=3)

    def manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a complete checkpoint; `ConfigError` when it is missing, incomplete or of another format."""
        path = self.path(step)
        if not path.exists():
            raise ConfigError(f"there is no checkpoint {path}: complete ones are {self.complete() or 'none'}")
        if not self._is_complete(path):
            raise ConfigError(f"checkpoint {path} is incomplete or damaged: {mend(path)}")
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise ConfigError(f"checkpoint {path} has format {manifest['format']}, this version reads {FORMAT}")
        return manifest

    def by_score(self) -> list[int]:
        """Steps of the complete checkpoints that have a score, best first; of equal ones the newest."""
        scores = {s: json.loads((self.path(s) / MANIFEST).read_text()).get("score") for s in self.complete()}
        known = {s: v for s, v in scores.items() if isinstance(v, int | float) and math.isfinite(v)}
        return sorted(known, key=lambda s: (known[s], s), reverse=True)

    def verify(self, step: int, files: Iterable[str]) -> None:
        """Raises `ConfigError` when a file of a checkpoint is not as it was written."""
        path, known = self.path(step), self.manifest(step)["files"]
        for file in files:
            try:
                same = fingerprint(path / file) == tuple(known[file])
            except OSError as error:
                raise ConfigError(f"checkpoint {path} cannot be read ({one_line(error)}): {mend(path)}") from error
            if not same:
                raise ConfigError(f"checkpoint {path} is damaged ({file} changed after it was written): {mend(path)}")

    def check_space(self, size: int) -> None:
        """Raises `ConfigError` when so many bytes do not fit."""
        if "://" in str(self.directory):
            return
        free, needed = shutil.disk_usage(self.directory).free, room(size)
        if free < needed:
            raise ConfigError(
                f"no space for a checkpoint in {self.directory}: {needed / 2**20:.0f} MiB needed, "
                f"{free / 2**20:.0f} MiB free; free some and continue with --resume, earlier ones are untouched"
            )

    def retire(self, path: epath.Path) -> None:
        """Deletes a checkpoint so that a half-done deletion cannot be taken for a checkpoint."""
        if path.exists():
            (doomed := self.directory / f"{PARTIAL}deleted-{path.name}").rmtree(missing_ok=True)
            path.rename(doomed)
            doomed.rmtree()

    def remove_partial(self) -> None:
        """Deletes what saves that did not finish have left."""
        for path in self.entries():
            if path.name.startswith(PARTIAL):
                path.rmtree() if path.is_dir() else path.unlink()

    @staticmethod
    def _is_complete(path: epath.Path) -> bool:
        """The manifest is written last, so its presence is the commit; sizes catch a copy that stopped half way."""
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            if not _is_whole(manifest):
                return False
            return all((path / file).stat().length == size for file, (size, _) in manifest["files"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False


def room(size: int) -> int:
    """Bytes of a disk that a checkpoint of so many bytes needs."""
    return int(size * 1.1) + 2**20


def check_arrays(path: epath.Path, item: str, wanted: dict[str, list], stored: dict[str, dict]) -> None:
    """Raises `ConfigError` naming the first array of an item that is not as wanted."""
    if item not in stored:
        raise ConfigError(
            f"checkpoint {path} holds {sorted(stored)}, not `{item}`: point to one of a full training run"
        )
    have = stored[item]
    for name, description in wanted.items():
        if name not in have:
            raise ConfigError(
                f"checkpoint {path} has no array {item}.{name}: it was written with another policy config"
            )
        if have[name] != description:
            raise ConfigError(
                f"checkpoint {path}: {item}.{name} is {_shape(have[name])}, the config asks for "
                f"{_shape(description)}: use the config the checkpoint was written with"
            )
    if surplus := sorted(set(have) - set(wanted)):
        raise ConfigError(
            f"checkpoint {path} has {item}.{surplus[0]}, which the config does not: "
            "use the config the checkpoint was written with"
        )


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves of a tree by their dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator=".") or "value": leaf for path, leaf in leaves}


def describe(arrays: Mapping[str, Any]) -> dict[str, list]:
    """Shape and type of arrays, as the manifest has them."""
    return {name: [list(a.shape), str(a.dtype)] for name, a in arrays.items()}


def abstract(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """What to restore arrays as: where they have no sharding, whole on this process's first device."""
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        k: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=getattr(a, "sharding", None) or default)
        for k, a in arrays.items()
    }


def list_files(root: epath.Path) -> list[str]:
    """Files below a directory, relative to it, in order."""
    found: list[str] = []
    for path in root.iterdir():
        found += [f"{path.name}/{name}" for name in list_files(path)] if path.is_dir() else [path.name]
    return sorted(found)


def fingerprint(path: epath.Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def mend(path: epath.Path) -> str:
    """What to do about a damaged checkpoint."""
    return f"delete {path} to go on from the checkpoint before it"


def one_line(error: BaseException) -> str:
    """An error of the file system, orbax or tensorstore, short enough for one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    for cause in ("No space left on device", "Disk quota exceeded", "File too large", "Permission denied"):
        if cause in text:  # tensorstore buries it under a list of nested paths
            return cause.lower()
    return text if len(text) <= 160 else text[:157] + "..."


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the checksum of its content: what is edited by hand is no checkpoint of ours any more."""
    return {**manifest, "seal": zlib.crc32(json.dumps(manifest, sort_keys=True).encode())}


def _is_whole(manifest: dict[str, Any]) -> bool:
    """Whether a manifest has all that a restore reads; anything but JSON objects raises."""
    content = {k: v for k, v in manifest.items() if k != "seal"}
    if "seal" in manifest and manifest != sealed(content):  # earlier versions wrote none
        return False
    described = all(_shape(d) for arrays in manifest["arrays"].values() for d in arrays.values())
    return described and "format" in manifest and isinstance(manifest["extra"], dict)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _shape(description: list) -> str:
    shape, dtype = description
    return f"{dtype}[{','.join(map(str, shape))}]"
