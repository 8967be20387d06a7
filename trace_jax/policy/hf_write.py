"""Policies as Hugging Face checkpoints: sharded safetensors, config.json, generation settings, tokenizer."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from trace_jax.config import ConfigError, PolicyConfig
from trace_jax.policy import fast_tokenizer, hf_config, hf_files
from trace_jax.policy.chat import Chat
from trace_jax.policy.hf_files import DTYPES, SHORT, Planned
from trace_jax.policy.hf_names import HEAD, Tensor
from trace_jax.policy.hf_names import tensors as layout
from trace_jax.policy.hf_read import Origin
from trace_jax.policy.hf_tokenizer import tokenizer_json
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.policy.transformer import Transformer

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.model"
PARTIAL = ".partial-export"
SHARD_BYTES = 5 * 10**9
SCRATCH = Origin()  # policies from scratch: float32


def export(
    directory: str | Path,
    model: Transformer,
    chat: Chat,
    *,
    origin: Origin = SCRATCH,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    generation: bytes | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Writes a checkpoint that `transformers`, vLLM or `load` open.

    The files are written in a subdirectory and renamed when all are complete, config.json last: an interrupted export
    leaves the old checkpoint, the new one, or one without config.json, which nothing loads, but never a mix.

    Args:
        origin: of an imported policy; its layout and types are kept.
        dtype: of all tensors: "float32", "bfloat16" or "float16"; None: as `origin` says.
        shard_bytes: a weight file gets no larger.
        generation: content of generation_config.json; None: it is made.
        progress: called with the number of tensors written and of all; what it raises ends the work.

    Raises:
        ConfigError: no architecture there is this policy's, it holds no finite numbers, or the directory cannot be
            written.
    """
    if dtype is not None:
        origin = replace(origin, dtype=SHORT[dtype], others={})
    ids = origin.tokens or {"eos_token_id": chat.stop_id, "pad_token_id": chat.tokenizer.pad_id}
    stored = {short: name for name, short in SHORT.items()}.get(origin.dtype, "float32")
    settings = hf_config.config_json(model.cfg, model.vocab_size, stored if stored != "float32" else None)
    settings["max_position_embeddings"] = origin.max_length or model.cfg.max_length
    made = {**ids, "do_sample": True} if generation is None else json.loads(generation)
    texts = {CONFIG: settings | dict(ids), GENERATION: made}
    files = hf_files.shards(planned(params_of(model), model.cfg, model.vocab_size, origin), shard_bytes)
    if len(files) > 1:
        texts[hf_files.INDEX] = hf_files.index(files)
    wanted = [tensor for group in files.values() for tensor in group.values()]
    written = itertools.count()

    def check() -> None:
        progress(next(written), len(wanted))

    def write(partial: Path) -> None:
        for name, content in texts.items():
            (partial / name).write_text(json.dumps(content, indent=1) + "\n")
        _write_tokenizer(partial, model.cfg, chat)
        for name, group in files.items():
            hf_files.write(partial / name, group, check)
        check()

    place(Path(directory), write, sum(tensor.size for tensor in wanted), _is_replaced, CONFIG)


def _is_replaced(name: str) -> bool:
    return hf_files.is_weights(name) or name in (TOKENIZER, *fast_tokenizer.FILES)


def place(
    directory: Path, write: Callable[[Path], None], size: int, replaced: Callable[[str], bool], last: str
) -> None:
    """Has files written beside a directory's own and puts them into it.

    Args:
        write: writes them into the directory it is given.
        size: of them, in bytes.
        replaced: names of files of an earlier export, which go.
        last: the file without which nothing loads the directory.

    Raises:
        ConfigError: it cannot be written.
    """
    partial = directory / PARTIAL  # inside: the same file system and permissions as the target
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if size > free:
            raise OSError(errno.ENOSPC, f"{-(-size // 2**20)} MiB needed, {free // 2**20} MiB free")
        write(partial)
        (directory / last).unlink(missing_ok=True)
        for path in [p for p in directory.iterdir() if replaced(p.name)]:
            path.unlink()
        for path in sorted(partial.iterdir(), key=lambda p: p.name == last):
            os.replace(path, directory / path.name)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"export: cannot write {directory}: {reason}; free space or choose another --out") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tokenizer(directory: Path, cfg: PolicyConfig, chat: Chat) -> None:
    tokenizer = chat.tokenizer
    if not isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer.save(directory)  # the files as they came
        return
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": tokenizer.piece(chat.stop_id),
        "pad_token": tokenizer.piece(tokenizer.pad_id),
        "unk_token": "<unk>",
        "chat_template": chat.template,
        "model_max_length": cfg.max_length,
    }
    for name, content in (("tokenizer.json", tokenizer_json(tokenizer)), ("tokenizer_config.json", settings)):
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")
    tokenizer.save(directory / TOKENIZER)


def params_of(model: Transformer) -> dict[str, Array]:
    """Parameters by name."""
    return {path[-1]: param.get_value() for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def planned(params: Mapping[str, Array], cfg: PolicyConfig, vocab_size: int, origin: Origin) -> dict[str, Planned]:
    """The tensors of a policy under the names and in the orientation that the Hugging Face classes use; a layer's
    weights leave the device when they are asked for.

    Raises:
        ConfigError: no architecture there is this policy's.
    """
    kind = hf_config.kind_of(cfg)
    fused = kind == hf_config.QWEN3_5_MOE if origin.fused is None else origin.fused
    held = _Held(params)

    def make(tensor: Tensor, dtype: str) -> Callable[[], np.ndarray]:
        def made() -> np.ndarray:
            array = _disk(tensor, held, dtype)
            if not hf_files.is_finite(array):
                raise ConfigError(
                    f"export: {tensor.name} in {dtype} has NaN or infinite numbers: "
                    + ("use --dtype bfloat16" if dtype == "F16" else "take an earlier policy (--stage)")
                )
            return array

        return made

    found = {}
    for tensor in layout(cfg, vocab_size, fused):
        dtype = origin.others.get(tensor.name, origin.dtype)
        name = tensor.name if tensor.name == HEAD else f"model.{tensor.name}"
        found[name] = Planned(dtype, tensor.shape, make(tensor, dtype))
    return found


def tensors(model: Transformer) -> dict[str, np.ndarray]:
    """All tensors of a policy in float32, see `planned`."""
    return {name: t.make() for name, t in planned(params_of(model), model.cfg, model.vocab_size, SCRATCH).items()}


def _disk(tensor: Tensor, held: _Held, dtype: str) -> np.ndarray:
    out = np.empty(tensor.shape, DTYPES[dtype])
    for piece in tensor.pieces:
        view = piece.view(out)
        with np.errstate(over="ignore"):  # of float16: it becomes infinite, which is found
            np.copyto(view, held.at(piece.parameter, piece.at).reshape(view.shape), casting="unsafe")
    return out


_layer = jax.jit(lambda array, layer: jax.lax.dynamic_index_in_dim(array, layer, keepdims=False))


class _Held:
    """Parameters on the host, of the stacked ones a layer at a time."""

    def __init__(self, params: Mapping[str, Array]):
        self._params = params
        self._last: dict[str, tuple[int, np.ndarray]] = {}

    def at(self, name: str, place: tuple[int, ...]) -> np.ndarray:
        array: Any = self._params[name]
        if isinstance(array, jax.Array) and len(array.devices()) == 1 and array.device.platform == "cpu":
            array = np.asarray(array)  # without a copy
        if isinstance(array, np.ndarray):
            return array[place]
        if not place:
            return np.asarray(array)
        layer, *rest = place
        if self._last.get(name, (-1,))[0] != layer:
            self._last[name] = (layer, np.asarray(_layer(array, layer)))
        return self._last[name][1][tuple(rest)]
