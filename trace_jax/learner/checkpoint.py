"""Checkpoints: orbax arrays, a JSON of everything else, and a rename that makes the whole visible at once.

    <directory>/00000012/params/...       one orbax tree per item, flat: {"layers.query": array}
    <directory>/00000012/optimizer/...
    <directory>/00000012/checkpoint.json  step, the caller's JSON, shape and type of the arrays, size and crc of files
    <directory>/.partial-00000015/        a save that did not finish; ignored, removed by the next save

A kill, a full disk or Ctrl-C at any moment leaves either the previous checkpoint or the new one, whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from trace_jax.config import ConfigError
from trace_jax.learner.step import Learner, TrainState

MANIFEST = "checkpoint.json"
PARTIAL = ".partial-"
FORMAT = 1


class CheckpointStore:
    """The checkpoints of one run (a local path or gs://)."""

    def __init__(self, directory: str, keep: int = 3):
        """
        Args:
            keep: newest checkpoints to keep; older ones are deleted after a successful save.
        """
        # Orbax refuses relative paths; buckets (gs://) are absolute as they are.
        self.directory = epath.Path(directory if "://" in os.fspath(directory) else os.path.abspath(directory))
        self.keep = keep
        self._orbax = ocp.Checkpointer(ocp.StandardCheckpointHandler())

    def save(self, step: int, items: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Writes one checkpoint; returns when it is complete. Ctrl-C meanwhile is delivered afterwards.

        Args:
            step: names the checkpoint; one of the same step is replaced.
            items: pytrees of arrays by name; each can be restored without the others.
            extra: JSON-able: data cursor, policy version, seeds, whatever an exact resume needs.

        Raises:
            ConfigError: no space, no permission, or another write failure; earlier checkpoints are untouched.
        """
        flat = {name: _flatten(tree) for name, tree in items.items()}
        final, partial = self._path(step), self.directory / f"{PARTIAL}{step:08d}"
        text = json.dumps({"format": FORMAT, "step": step, "extra": extra, "arrays": _describe(flat)})
        with _deferred_interrupt(), _quiet():
            try:
                self._remove_partial()
                self.directory.mkdir(parents=True, exist_ok=True)
                self._check_space(sum(a.nbytes for arrays in flat.values() for a in arrays.values()))
                for name, arrays in flat.items():
                    self._orbax.save(partial / name, args=ocp.args.StandardSave(arrays))
                manifest = json.loads(text) | {"files": _inventory(partial)}
                (partial / MANIFEST).write_text(json.dumps(manifest))
                self._retire(final)  # same step again, after resuming from an earlier one
                partial.rename(final)
            except ConfigError:
                raise
            except Exception as error:  # orbax and tensorstore wrap errno in types of their own
                with contextlib.suppress(OSError):
                    self._remove_partial()
                raise ConfigError(
                    f"checkpoint {final} could not be written ({_one_line(error)}): "
                    "free or fix that location; earlier checkpoints are untouched, continue with --resume"
                ) from error
            for old in self._complete()[: -self.keep]:
                self._retire(self._path(old))

    def steps(self) -> list[int]:
        """Complete checkpoints, oldest first; warns about every incomplete one, which is skipped."""
        complete = self._complete()
        whole = {self._path(s).name for s in complete}
        for path in sorted(self._entries()):
            partial = path.name.startswith(PARTIAL)
            if partial or (_is_step(path.name) and path.name not in whole):
                why = "its save did not finish" if partial else "files of it are missing or not as they were saved"
                warnings.warn(f"skipping incomplete checkpoint {path}: {why}", stacklevel=2)
        return complete

    def latest(self) -> int | None:
        """Newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def extra(self, step: int) -> dict[str, Any]:
        """The JSON stored with a checkpoint."""
        return self._manifest(step)["extra"]

    def restore(self, step: int, items: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads items of a checkpoint.

        Args:
            items: for each name a tree of arrays or `jax.ShapeDtypeStruct`: the structure, shapes and types that were
                saved, and the shardings wanted now.

        Returns:
            The trees by name, and the extra JSON.

        Raises:
            ConfigError: missing, incomplete, damaged, or with other arrays than asked for.
        """
        path, manifest = self._path(step), self._manifest(step)
        for name, like in items.items():
            self._check_arrays(path, name, _describe({name: _flatten(like)})[name], manifest["arrays"])
        wanted = {file: v for file, v in manifest["files"].items() if file.split("/")[0] in items}
        for file, (size, crc) in wanted.items():
            if _fingerprint(path / file) != (size, crc):
                raise ConfigError(f"checkpoint {path} is damaged ({file} changed after it was written): {_mend(path)}")
        restored = {}
        for name, like in items.items():
            try:
                with _quiet():
                    arrays = self._orbax.restore(path / name, args=ocp.args.StandardRestore(_abstract(_flatten(like))))
            except Exception as error:
                raise ConfigError(f"checkpoint {path} cannot be read ({_one_line(error)}): {_mend(path)}") from error
            names = list(_flatten(like))
            restored[name] = jax.tree.unflatten(jax.tree.structure(like), [arrays[n] for n in names])
        return restored, manifest["extra"]

    def _path(self, step: int) -> epath.Path:
        return self.directory / f"{step:08d}"

    def _entries(self) -> list[epath.Path]:
        try:
            return list(self.directory.iterdir()) if self.directory.exists() else []
        except OSError as error:
            raise ConfigError(
                f"checkpoints in {self.directory} cannot be listed ({_one_line(error)}): "
                "it must be a readable directory; move what is there away or mend its permissions"
            ) from error

    def _complete(self) -> list[int]:
        steps = sorted({int(p.name) for p in self._entries() if _is_step(p.name)})
        return [s for s in steps if self._is_complete(self._path(s))]

    def _is_complete(self, path: epath.Path) -> bool:
        """The manifest is written last, so its presence is the commit; sizes catch a copy that stopped half way."""
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            if not _is_whole(manifest):
                return False
            return all((path / file).stat().length == size for file, (size, _) in manifest["files"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False

    def _manifest(self, step: int) -> dict[str, Any]:
        path = self._path(step)
        if not path.exists():
            raise ConfigError(f"there is no checkpoint {path}: complete ones are {self._complete() or 'none'}")
        if not self._is_complete(path):
            raise ConfigError(f"checkpoint {path} is incomplete or damaged: {_mend(path)}")
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise ConfigError(f"checkpoint {path} has format {manifest['format']}, this version reads {FORMAT}")
        return manifest

    @staticmethod
    def _check_arrays(path: epath.Path, item: str, wanted: dict, stored: dict) -> None:
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

    def _check_space(self, size: int) -> None:
        if "://" in str(self.directory):
            return
        free, needed = shutil.disk_usage(self.directory).free, int(size * 1.1) + 2**20
        if free < needed:
            raise ConfigError(
                f"no space for a checkpoint in {self.directory}: {needed / 2**20:.0f} MiB needed, "
                f"{free / 2**20:.0f} MiB free; free some and continue with --resume, earlier ones are untouched"
            )

    def _retire(self, path: epath.Path) -> None:
        """Deletes a checkpoint so that a half-done deletion cannot be taken for a checkpoint."""
        if path.exists():
            (doomed := self.directory / f"{PARTIAL}deleted-{path.name}").rmtree(missing_ok=True)
            path.rename(doomed)
            doomed.rmtree()

    def _remove_partial(self) -> None:
        for path in self._entries():
            if path.name.startswith(PARTIAL):
                path.rmtree()


def save_state(store: CheckpointStore, state: TrainState, extra: Mapping[str, Any]) -> None:
    """Saves a train state under its own step; items "params" (enough to evaluate or export) and "optimizer"."""
    optimizer = {"step": state.step, "opt_state": state.opt_state}
    store.save(int(state.step), {"params": state.params, "optimizer": optimizer}, extra)


def restore_state(
    store: CheckpointStore, learner: Learner, params: Any, step: int | None = None
) -> tuple[TrainState, dict[str, Any]] | None:
    """Restores a train state onto the learner's mesh, bit for bit; None when there is no complete checkpoint.

    Args:
        params: parameters (or their shapes) of the configured policy.
        step: which checkpoint; None takes the newest complete one.

    Raises:
        ConfigError: see `CheckpointStore.restore`.
    """
    step = store.latest() if step is None else step
    if step is None:
        return None
    like = learner.state_like(params)
    items = {"params": like.params, "optimizer": {"step": like.step, "opt_state": like.opt_state}}
    restored, extra = store.restore(step, items)
    optimizer = restored["optimizer"]
    return TrainState(step=optimizer["step"], params=restored["params"], opt_state=optimizer["opt_state"]), extra


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Holds back the first Ctrl-C until the block is done; a second one interrupts at once (still atomic)."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    pending = []

    def remember(number, frame):
        pending.append(number)
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            previous(signal.SIGINT, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps orbax from logging a traceback for a failure that becomes one line here."""
    logger = logging.getLogger("absl")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _is_whole(manifest: dict[str, Any]) -> bool:
    """Whether a manifest has all that a restore reads; anything but JSON objects raises."""
    described = all(_shape(d) for arrays in manifest["arrays"].values() for d in arrays.values())
    return described and "format" in manifest and isinstance(manifest["extra"], dict)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _flatten(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator=".") or "value": leaf for path, leaf in leaves}


def _describe(flat: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list]]:
    return {item: {k: [list(a.shape), str(a.dtype)] for k, a in arrays.items()} for item, arrays in flat.items()}


def _shape(description: list) -> str:
    shape, dtype = description
    return f"{dtype}[{','.join(map(str, shape))}]"


def _abstract(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        k: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=getattr(a, "sharding", None) or default)
        for k, a in arrays.items()
    }


def _inventory(root: epath.Path) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for path in root.iterdir():
        if path.is_dir():
            found |= {f"{path.name}/{name}": value for name, value in _inventory(path).items()}
        else:
            found[path.name] = _fingerprint(path)
    return found


def _fingerprint(path: epath.Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def _mend(path: epath.Path) -> str:
    return f"delete {path} to go on from the checkpoint before it"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    for cause in ("No space left on device", "Disk quota exceeded", "File too large", "Permission denied"):
        if cause in text:  # tensorstore buries it under a list of nested paths
            return cause.lower()
    return text if len(text) <= 160 else text[:157] + "..."
