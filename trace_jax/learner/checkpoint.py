"""Checkpoints: orbax arrays, files, a JSON of everything else, and a rename that makes the whole visible at once.

    <directory>/00000012/params/...       one orbax tree per item, flat: {"layers.query": array}
    <directory>/00000012/optimizer/...
    <directory>/00000012/files/...        what the caller gave as files, as it was
    <directory>/00000012/checkpoint.json  step, score, the caller's JSON, shape and type of the arrays, size and crc of
                                          files
    <directory>/.partial-00000015*        a save that did not finish; ignored, removed by the next save

A kill, a full disk or Ctrl-C at any moment leaves either the previous checkpoint or the new one, whole.

With several processes every one of them makes the same calls with the same arguments and writes its own shards into the
one directory, which all must see; process 0 writes the rest, renames and deletes. They meet through `multihost`, so a
save in the background meets nobody's device program.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from trace_jax.config import ConfigError
from trace_jax.learner import multihost
from trace_jax.learner.checkpoint_async import Background, deferred_interrupt, quiet
from trace_jax.learner.checkpoint_files import (
    FILES,
    FORMAT,
    MANIFEST,
    PARTIAL,
    Folder,
    abstract,
    check_arrays,
    describe,
    fingerprint,
    flatten,
    list_files,
    mend,
    one_line,
    sealed,
)
from trace_jax.learner.step import Learner, TrainState


class CheckpointStore:
    """The checkpoints of one run (a local path or gs://).

    As a context manager it waits for the save in the background at the end. Whatever reads the store waits for that
    save first: a store always sees what it was told to save.
    """

    def __init__(self, directory: str, keep: int = 3, keep_best: int = 0, background: bool = False):
        """
        Args:
            keep: newest checkpoints to keep; older ones are deleted after a successful save.
            keep_best: besides those, so many with the highest score.
            background: `save` returns once it has copied everything; the writing goes on beside the training.
        """
        # Orbax refuses relative paths; buckets (gs://) are absolute as they are.
        self.directory = epath.Path(directory if "://" in os.fspath(directory) else os.path.abspath(directory))
        self.keep, self.keep_best, self.background = keep, keep_best, background
        self._folder = Folder(self.directory)
        self._pending = Background()
        self._is_shared = False
        self._verified: set[int] = set()  # checkpoints whose files were read and are whole
        # What processes call this store among themselves. Not by the whole path: where that differs they must meet to
        # find out (`_check_shared`).
        self._name = f"checkpoint-{self.directory.name}"

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.close()
        except ConfigError as error:
            if kind is None:
                raise
            warnings.warn(str(error), stacklevel=2)  # what ended the block is the news

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        extra: Mapping[str, Any],
        *,
        score: float | None = None,
        files: Mapping[str, bytes | os.PathLike] | None = None,
    ) -> None:
        """Writes one checkpoint; complete when this returns, or with `background` when `wait` does.

        The arrays may be donated, changed or deleted as soon as this returns. Waits for the save before this one.
        Ctrl-C meanwhile is delivered afterwards.

        Args:
            step: names the checkpoint; one of the same step is replaced.
            items: pytrees of arrays by name; each can be restored without the others.
            extra: JSON-able: data cursor, policy version, seeds, whatever an exact resume needs.
            score: higher is better, for `keep_best`; NaN counts as none.
            files: content or path of further files by plain name; process 0's are stored.

        Raises:
            ConfigError: no space, no permission, or another write failure, of this save or of the one in the
                background before it; earlier checkpoints are untouched.
        """
        self.wait()
        self._verified.discard(step)
        for name in (*items, *(files or ())):
            if name != os.path.basename(name) or name.startswith(".") or name in ("", FILES, MANIFEST):
                raise ValueError(f"a checkpoint cannot hold something called {name!r}")
        flat = {name: _own(flatten(tree)) for name, tree in items.items()}
        score = None if score is None or not math.isfinite(score) else float(score)
        # encoded here: what cannot be is the caller's mistake, and what can may change after this returns
        arrays = {name: describe(a) for name, a in flat.items()}
        text = json.dumps({"format": FORMAT, "step": step, "score": score, "extra": extra, "arrays": arrays})
        with deferred_interrupt(), quiet(), self._cleaning_up(step):
            size = sum(a.nbytes for arrays in flat.values() for a in arrays.values())
            contents = multihost.together(f"{self._name}/begin", lambda: self._begin(size, files or {}))
            self._check_shared(contents[0])
            held = {
                name: v if isinstance(v, bytes) else epath.Path(v).read_bytes() for name, v in (files or {}).items()
            }
            saves = {name: ocp.args.StandardSave(a) for name, a in flat.items()}
            self._orbax.save(self._folder.partial(step), args=ocp.args.Composite(**saves))
            if not self.background:
                self._finish(step, text, held)
        if self.background:
            self._pending.start(lambda: self._finish_in_background(step, text, held))

    def wait(self) -> None:
        """Returns when nothing is being saved; Ctrl-C meanwhile is delivered afterwards.

        Raises:
            ConfigError: the save in the background failed; earlier checkpoints are untouched.
        """
        if self._pending.busy:
            with deferred_interrupt():
                self._pending.wait()

    def close(self) -> None:
        """`wait`, then gives up the threads; the store can be used again."""
        self.wait()
        if "_orbax" in self.__dict__:
            self._orbax.close()
            del self.__dict__["_orbax"]

    def steps(self) -> list[int]:
        """Complete checkpoints, oldest first; warns about every incomplete one, which is skipped."""
        self.wait()
        complete = self._folder.complete()
        self._folder.warn_of_incomplete(complete)
        return complete

    def latest(self) -> int | None:
        """Newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Complete checkpoint with the highest score, of equal ones the newest; None when none has a score."""
        self.wait()
        return next(iter(self._folder.by_score()), None)

    def newest_whole(self) -> int | None:
        """Newest complete checkpoint whose files are as they were written, the same in all processes; None without
        any. Each process reads a share of the files; warns of every damaged checkpoint that is passed over.

        Raises:
            ConfigError: all are damaged; or processes see different checkpoints.
        """
        steps, told = self.steps(), ""
        seen = multihost.gather(f"{self._name}/steps", steps)
        if any(other != steps for other in seen):
            raise ConfigError(
                f"processes see different checkpoints in {self.directory} ({[max(s, default=None) for s in seen]}): "
                "several processes need one directory on a file system they share (NFS, Lustre, gs://)"
            )
        for step in reversed(steps):
            damage = next(filter(None, multihost.gather(f"{self._name}/whole", self._damage(step))), None)
            if damage is None:
                self._verified.add(step)
                return step
            told = told or damage
            if step != steps[0]:
                warnings.warn(f"{damage}; going on from the one before it", stacklevel=2)
        if told:
            raise ConfigError(told)
        return None

    def _damage(self, step: int) -> str | None:
        files = self._share(self._folder.manifest(step)["files"])
        try:
            self._folder.verify(step, files)
        except ConfigError as error:
            return str(error)
        return None

    @staticmethod
    def _share(files: Iterable[str]) -> list[str]:
        """Those that this process reads of what all read together."""
        return sorted(files)[multihost.index() :: multihost.count()]

    def extra(self, step: int) -> dict[str, Any]:
        """The JSON stored with a checkpoint."""
        return self._manifest(step)["extra"]

    def items(self, step: int) -> list[str]:
        """Names of the pytrees a checkpoint holds."""
        return sorted(self._manifest(step)["arrays"])

    def files(self, step: int) -> list[str]:
        """Names of the files a checkpoint holds."""
        inside = (file.partition("/") for file in self._manifest(step)["files"])
        return sorted(name for folder, _, name in inside if folder == FILES and name)

    def restore_file(self, step: int, name: str) -> epath.Path:
        """Path of a file of a checkpoint, its content verified; it goes when the checkpoint is deleted.

        Raises:
            ConfigError: no such checkpoint or file, or a damaged one.
        """
        if name not in (known := self.files(step)):
            raise ConfigError(f"checkpoint {self._folder.path(step)} has no file `{name}`, only {known or 'none'}")
        self._folder.verify(step, [f"{FILES}/{name}"])
        return self._folder.path(step) / FILES / name

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
        self.wait()
        path = self._folder.path(step)
        extra = multihost.together(f"{self._name}/check", lambda: self._check(step, items))[0]
        restored = {}
        for name, like in items.items():
            try:
                with quiet():
                    arrays = self._reader.restore(path / name, args=ocp.args.StandardRestore(abstract(flatten(like))))
            except Exception as error:
                raise ConfigError(f"checkpoint {path} cannot be read ({one_line(error)}): {mend(path)}") from error
            restored[name] = jax.tree.unflatten(jax.tree.structure(like), [arrays[n] for n in flatten(like)])
        return restored, extra

    @cached_property
    def _orbax(self) -> ocp.AsyncCheckpointer:
        options = self._options()
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=options)
        )
        # made at once: the first file of a save that is killed shows that there was one
        now = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        return ocp.AsyncCheckpointer(handler, multiprocessing_options=options, async_options=now)

    @cached_property
    def _reader(self) -> ocp.Checkpointer:
        options = self._options()
        handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
        return ocp.Checkpointer(handler, multiprocessing_options=options)

    def _options(self) -> ocp.options.MultiprocessingOptions:
        # naming the processes makes orbax meet through the coordination service instead of the devices
        several = multihost.count() > 1
        return ocp.options.MultiprocessingOptions(
            active_processes=set(range(multihost.count())) if several else None,
            barrier_sync_key_prefix=self._name if several else None,
        )

    def _manifest(self, step: int) -> dict[str, Any]:
        self.wait()
        return self._folder.manifest(step)

    def _check(self, step: int, items: Mapping[str, Any]) -> dict[str, Any]:
        """Compares with the manifest what is asked for, and this process's share of the files; returns the extra."""
        manifest = self._folder.manifest(step)
        for name, like in items.items():
            check_arrays(self._folder.path(step), name, describe(flatten(like)), manifest["arrays"])
        if step not in self._verified:
            self._folder.verify(step, self._share(file for file in manifest["files"] if file.split("/")[0] in items))
        return manifest["extra"]

    def _begin(self, size: int, files: Mapping[str, bytes | os.PathLike]) -> str:
        """Makes room; returns the name of a mark by which the others know the directory."""
        if multihost.index():
            return ""
        with contextlib.suppress(Exception):  # of a save that was given up
            self._orbax.wait_until_finished()
        self._folder.remove_partial()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._folder.check_space(size + sum(_size(v) for v in files.values()))
        if multihost.count() == 1 or self._is_shared:
            return ""
        (mark := self.directory / f"{PARTIAL}mark-{uuid.uuid4().hex}").touch()
        return mark.name

    def _check_shared(self, mark: str) -> None:
        """Refuses a directory that is not the same one for all processes."""
        if not mark:
            return

        def look():
            if not (self.directory / mark).exists():
                raise ConfigError(
                    f"checkpoint directory {self.directory} of process {multihost.index()} is not that of process 0: "
                    "several processes need one on a file system they share (NFS, Lustre, gs://)"
                )

        try:
            multihost.together(f"{self._name}/shared", look)
            self._is_shared = True
        finally:
            if multihost.index() == 0:
                (self.directory / mark).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _cleaning_up(self, step: int):
        """Turns whatever a write may raise into one line, and leaves nothing half-written behind."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # orbax and tensorstore wrap errno in types of their own
            if multihost.index() == 0:
                with contextlib.suppress(OSError, ConfigError):
                    self._folder.remove_partial()
            raise ConfigError(
                f"checkpoint {self._folder.path(step)} could not be written ({one_line(error)}): "
                "free or fix that location; earlier checkpoints are untouched, continue with --resume"
            ) from error

    def _finish_in_background(self, step: int, text: str, files: Mapping[str, bytes]) -> None:
        with quiet(), self._cleaning_up(step):
            self._finish(step, text, files)

    def _finish(self, step: int, text: str, files: Mapping[str, bytes]) -> None:
        """Waits for the arrays, adds files and manifest, commits; each process fingerprints its share of the files."""
        partial = self._folder.partial(step)

        def written() -> list[str]:
            self._orbax.wait_until_finished()
            if multihost.index():
                return []
            if files:
                (partial / FILES).mkdir()
            for name, content in files.items():
                (partial / FILES / name).write_bytes(content)
            return list_files(partial)

        names = multihost.together(f"{self._name}/written", written)[0]
        mine = names[multihost.index() :: multihost.count()]
        shares = multihost.together(
            f"{self._name}/fingerprints", lambda: {name: fingerprint(partial / name) for name in mine}
        )
        known = {name: value for share in shares for name, value in share.items()}
        multihost.together(f"{self._name}/commit", lambda: multihost.index() or self._commit(step, text, known))

    def _commit(self, step: int, text: str, files: Mapping[str, tuple[int, int]]) -> None:
        """Writes the manifest, makes the checkpoint visible, deletes what need not be kept."""
        partial, final = self._folder.partial(step), self._folder.path(step)
        manifest = json.loads(json.dumps(json.loads(text) | {"files": files}))  # as it is read
        (partial / MANIFEST).write_text(json.dumps(sealed(manifest)))
        self._folder.retire(final)  # same step again, after resuming from an earlier one
        partial.rename(final)
        complete = self._folder.complete()
        stay = {*complete[-self.keep :], *(self._folder.by_score()[: self.keep_best] if self.keep_best else ())}
        for old in complete:
            if old not in stay:
                self._folder.retire(self._folder.path(old))


def save_state(
    store: CheckpointStore,
    state: TrainState,
    extra: Mapping[str, Any],
    *,
    score: float | None = None,
    items: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes | os.PathLike] | None = None,
) -> None:
    """Saves a train state under its own step; items "params" (enough to evaluate or export) and "optimizer".

    Args:
        items: further pytrees, e.g. the sampler's parameters when they are older than the state's.
        score, files: see `CheckpointStore.save`.
    """
    optimizer = {"step": state.step, "opt_state": state.opt_state}
    everything = {**(items or {}), "params": state.params, "optimizer": optimizer}
    store.save(int(state.step), everything, extra, score=score, files=files)


def restore_state(
    store: CheckpointStore, learner: Learner, params: Any, step: int | None = None
) -> tuple[TrainState, dict[str, Any]] | None:
    """Restores a train state onto the learner's mesh, bit for bit; None when there is no complete checkpoint.

    `int(state.step)` of the result names the checkpoint, for its files and further items.

    Args:
        params: parameters (or their shapes) of the configured policy.
        step: which checkpoint; None takes the newest that is whole (`CheckpointStore.newest_whole`).

    Raises:
        ConfigError: see `CheckpointStore.restore` and `newest_whole`.
    """
    step = store.newest_whole() if step is None else step
    if step is None:
        return None
    like = learner.state_like(params)
    items = {"params": like.params, "optimizer": {"step": like.step, "opt_state": like.opt_state}}
    restored, extra = store.restore(step, items)
    optimizer = restored["optimizer"]
    return TrainState(step=optimizer["step"], params=restored["params"], opt_state=optimizer["opt_state"]), extra


def _own(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays nobody else can change: those of JAX as they are (orbax holds what it reads), those of NumPy copied."""
    return {k: np.array(a) if isinstance(a, np.ndarray | np.generic) else a for k, a in arrays.items()}


def _size(file: bytes | os.PathLike) -> int:
    return len(file) if isinstance(file, bytes) else epath.Path(file).stat().length
