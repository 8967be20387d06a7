"""Adapters as a directory that `peft` opens: adapter_model.safetensors and adapter_config.json.

A module there may hold several of our targets (the query and its gate; query, key and value of a delta layer). Its
adapter is theirs side by side: ranks add up, A is stacked, and each part's rows of B are zero but for its own rank.
`alpha` of such a module grows with its rank, so that the scale alpha / rank stays what it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.config import ConfigError, LoraConfig, PolicyConfig
from trace_jax.policy import hf_config, hf_files
from trace_jax.policy.hf_files import Planned
from trace_jax.policy.hf_names import Tensor, tensors
from trace_jax.policy.hf_write import place
from trace_jax.policy.lora import Pair, Pairs

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model.model."


def check(cfg: LoraConfig) -> None:
    """Refuses adapters that `peft` has no form for.

    Raises:
        ConfigError: there are none, some are of experts, or a gate mixes several.
    """
    if cfg.gate:
        raise ConfigError(f"export: PEFT has no form for a gate over adapters: export {', '.join(cfg.gate)} one by one")
    if not cfg.rank:
        raise ConfigError("export: this policy has no adapters (lora.rank is 0): use --format hf")
    if experts := [name for name in cfg.targets if name.startswith("expert_")]:
        raise ConfigError(
            f"export: PEFT has no form for adapters of single experts ({', '.join(experts)}): use --format hf, which "
            "merges them"
        )


def export(directory: str | Path, policy: PolicyConfig, cfg: LoraConfig, pairs: Pairs, dtype: str = "F32") -> None:
    """Writes one adapter.

    Args:
        pairs: adapter 0 of them is written. dtype: as safetensors names it.

    Raises:
        ConfigError: see `check`, or the directory cannot be written.
    """
    check(cfg)
    hf_config.kind_of(policy)
    found, patterns, modules = {}, {}, set()
    arrays = {name: Pair(*(np.asarray(x, np.float32)[:, 0] for x in pair)) for name, pair in pairs.items()}
    for tensor in tensors(policy, 1, fused=True):
        parts = [piece for piece in tensor.pieces if piece.parameter in arrays]
        if not parts:
            continue
        module = tensor.name.removesuffix(".weight")
        short = module.split(".", 2)[2]  # without `layers.N`
        modules.add(short)
        if len(parts) > 1:
            patterns[short] = len(parts)
        rank, (rows, columns) = cfg.rank * len(parts), tensor.shape
        a, b = _stacked_a(tensor, arrays), _blocks_b(tensor, arrays, rank)
        found[f"{_PREFIX}{module}.lora_A.weight"] = Planned(dtype, (rank, columns), a)
        found[f"{_PREFIX}{module}.lora_B.weight"] = Planned(dtype, (rows, rank), b)
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": cfg.rank,
        "lora_alpha": cfg.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
        "target_modules": sorted(modules),
        "rank_pattern": {name: cfg.rank * count for name, count in sorted(patterns.items())},
        "alpha_pattern": {name: cfg.alpha * count for name, count in sorted(patterns.items())},
    }

    def write(partial: Path) -> None:
        (partial / CONFIG).write_text(json.dumps(settings, indent=1) + "\n")
        hf_files.write(partial / WEIGHTS, found)

    size = sum(tensor.size for tensor in found.values())
    place(Path(directory), write, size, lambda name: name == WEIGHTS, CONFIG)


def _stacked_a(tensor: Tensor, pairs: Pairs) -> Callable[[], np.ndarray]:
    parts = [piece for piece in tensor.pieces if piece.parameter in pairs]
    return lambda: np.concatenate([pairs[piece.parameter].a[piece.at].T for piece in parts])


def _blocks_b(tensor: Tensor, pairs: Pairs, rank: int) -> Callable[[], np.ndarray]:
    parts = [piece for piece in tensor.pieces if piece.parameter in pairs]

    def make() -> np.ndarray:
        rows, columns = tensor.shape
        found = np.zeros((rows, rank), np.float32)
        # Which row of the tensor each output feature of a part is: the view of a table of row numbers says it.
        numbers = np.broadcast_to(np.arange(rows)[:, None], (rows, columns)).copy()
        begin = 0
        for piece in parts:
            b = pairs[piece.parameter].b[piece.at]  # [r, b]
            mine = piece.view(numbers)[0].reshape(-1)
            found[mine, begin : begin + len(b)] = b.T
            begin += len(b)
        return found

    return make
