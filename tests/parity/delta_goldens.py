"""Writes tests/golden/delta_layer.npz: a small gated delta net layer of transformers with random weights, what it makes
of an input, and the gradients. Run by an environment with torch and transformers (CPU):

    python tests/parity/delta_goldens.py
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

SIZES = {
    "hidden_size": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
}
ROWS, TIME = 2, 70


def arrays(seed: int, **sizes: int) -> dict[str, np.ndarray]:
    """Weights (by their names on disk), input, output, gradients, and `decoded`: the first nine outputs by three tokens
    at once and then one by one."""
    torch.manual_seed(seed)
    sizes = SIZES | sizes
    config = Qwen3_5MoeTextConfig(num_hidden_layers=1, layer_types=["linear_attention"], **sizes)
    layer = Qwen3_5MoeGatedDeltaNet(config, 0).float()
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if name.startswith(("in_proj", "out_proj", "conv1d")):
                weight.copy_(torch.randn(weight.shape) * (0.6 if name == "conv1d.weight" else weight.shape[1] ** -0.5))
            elif name == "A_log":
                weight.copy_(torch.log(torch.rand(weight.shape) * 0.4 + 0.02))  # memories of a few to fifty tokens
            else:
                weight.add_(torch.randn(weight.shape) * 0.3)
    x, d_out = torch.randn(2, ROWS, TIME, sizes["hidden_size"])
    x.requires_grad_(True)
    out = layer(x)
    (out * d_out).sum().backward()
    with torch.no_grad():
        cache = DynamicCache(config=config)
        parts = [layer(x[:, :3], cache=cache), *(layer(x[:, t : t + 1], cache=cache) for t in range(3, 9))]
    made = {"x": x, "d_out": d_out, "out": out, "d_x": x.grad, "decoded": torch.cat(parts, dim=1)}
    made |= {"weight/" + name: weight for name, weight in layer.named_parameters()}
    made |= {"gradient/" + name: weight.grad for name, weight in layer.named_parameters()}
    return {name: a.detach().numpy() for name, a in made.items()}


def main():
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    path = Path(__file__).parents[1] / "golden" / "delta_layer.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, versions=versions, sizes=json.dumps(SIZES), **arrays(0))
    print(f"{path}: {path.stat().st_size} bytes; {versions}")


if __name__ == "__main__":
    main()
