"""Writes the golden values of tests/test_policy_hf.py: tiny random Qwen3 and Llama models of `transformers`.

Run where the `parity` extra is installed: `python tests/parity/write_golden.py`. Each file holds config.json, the
safetensors weights, token ids, the logits of `transformers` on CPU in float32, and the versions that made them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

GOLDEN = Path(__file__).parent / "golden"
SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS = {
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}, 1e6),
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}, 1e4),
    "llama_tied": (transformers.LlamaConfig, {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}, 1e5),
}


def write(name: str) -> None:
    kind, extra, theta = MODELS[name]
    torch.manual_seed(0)
    config = kind(**SIZES, **extra, rope_parameters={"rope_type": "default", "rope_theta": theta})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():  # norm gains too, which start at one
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    ids = torch.randint(0, SIZES["vocab_size"], (2, 33))
    with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
        logits = model(ids).logits
        model.save_pretrained(directory)
        files = {stem: (Path(directory) / stem).read_bytes() for stem in ("config.json", "model.safetensors")}
    np.savez_compressed(
        GOLDEN / f"{name}.npz",
        config=np.frombuffer(files["config.json"], np.uint8),
        weights=np.frombuffer(files["model.safetensors"], np.uint8),
        ids=ids.numpy(),
        logits=logits.numpy(),
        versions=np.array([f"torch {torch.__version__}", f"transformers {transformers.__version__}"]),
    )


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in MODELS:
        write(name)
