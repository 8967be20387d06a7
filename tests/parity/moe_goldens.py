"""Writes the golden values of tests/test_policy_moe.py: tiny mixture-of-experts blocks of `transformers`.

Run where the `parity` extra is installed: `python tests/parity/moe_goldens.py`. A file holds the input, the weights by
the names they have on disk, output and gradients of `sum(output * cotangent)` on CPU in float32, and the versions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = {"hidden_size": 12, "moe_intermediate_size": 8, "num_experts": 6, "num_experts_per_tok": 3}
TOKENS = 37


def blocks():
    for name, renormalise in (("moe_qwen3", True), ("moe_qwen3_plain", False)):
        yield name, qwen3.Qwen3MoeSparseMoeBlock(transformers.Qwen3MoeConfig(**SIZES, norm_topk_prob=renormalise))
    config = transformers.Qwen3_5MoeTextConfig(**SIZES, shared_expert_intermediate_size=10)
    yield "moe_qwen3_5", qwen3_5.Qwen3_5MoeSparseMoeBlock(config)


def write(name: str, block: torch.nn.Module) -> None:
    torch.manual_seed(0)
    block = block.float().eval()
    for parameter in block.parameters():
        parameter.data.normal_(std=0.5)
    x = torch.randn(1, TOKENS, SIZES["hidden_size"], requires_grad=True)
    cotangent = torch.randn(1, TOKENS, SIZES["hidden_size"])
    y = block(x)
    (y * cotangent).sum().backward()
    arrays = {"x": x[0], "y": y[0], "cotangent": cotangent[0], "d_x": x.grad[0]}
    for parameter, value in block.named_parameters():
        arrays |= {f"weight.{parameter}": value, f"grad.{parameter}": value.grad}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    GOLDEN.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN / f"{name}.npz", **{k: v.detach().numpy() for k, v in arrays.items()}, **versions)


if __name__ == "__main__":
    for name, block in blocks():
        write(name, block)
