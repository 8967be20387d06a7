"""Tiny random models of `transformers` as checkpoints, and checkpoints of ours read by `transformers` and `peft`.

Run where the `parity` extra is installed:

    python tests/parity/model_goldens.py                      writes tests/golden/model_*.npz
    python tests/parity/model_goldens.py random DIR COUNT     the same of COUNT random configurations, into DIR
    python tests/parity/model_goldens.py open OUT DIR...      opens checkpoints, writes their logits to OUT (an .npz)
    python tests/parity/model_goldens.py adapt OUT BASE DIR   the same of an adapter on a checkpoint

A file holds the checkpoint's files (`file.<name>`), token ids, logits and the gradient of one tensor (of the mean
cross-entropy of the next tokens) on CPU in float32, and the versions that made them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import transformers

GOLDEN = Path(__file__).parents[1] / "golden"
VOCABULARY, TIME = 96, 21
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
SHARED = {"shared_expert_intermediate_size": 20}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "qwen3_5_text": transformers.Qwen3_5TextConfig,
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig,
}
DENSE, FUSED, SINGLE = "dense", "fused", "single"
Q, GATE_UP = "self_attn.q_proj.weight", "mlp.experts.gate_up_proj"
# name: family, settings over SIZES, rotary base, how it is stored, the tensor whose gradient is kept
MODELS: dict[str, tuple[str, dict, float, dict, str]] = {
    "llama": (
        "llama",
        {"num_key_value_heads": 1, "intermediate_size": 40, "num_hidden_layers": 3, "tie_word_embeddings": True},
        1e4,
        {"old_rope": True, "spare_head": True},
        "model.layers.1.self_attn.o_proj.weight",
    ),
    "qwen3": (
        "qwen3",
        {"intermediate_size": 40, "num_hidden_layers": 2, "tie_word_embeddings": False},
        1e6,
        {"shards": 3, "dtype": "bfloat16"},
        f"model.layers.0.{Q}",
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**EXPERTS, "num_key_value_heads": 4, "num_hidden_layers": 2, "norm_topk_prob": True},
        1e6,
        {"experts": SINGLE, "old_rope": True, "dtype": "bfloat16"},
        f"model.layers.1.{GATE_UP}",
    ),
    "qwen3_moe_plain": (
        "qwen3_moe",
        {**EXPERTS, "num_hidden_layers": 1, "norm_topk_prob": False, "tie_word_embeddings": True},
        1e5,
        {"experts": FUSED, "dtype": "bfloat16"},
        f"model.layers.0.{Q}",
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            **DELTA,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "full_attention_interval": 2,
        },
        1e6,
        {"dtype": "bfloat16"},
        f"model.layers.1.{Q}",
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**DELTA, **EXPERTS, **SHARED, "num_hidden_layers": 3, "head_dim": 16, "full_attention_interval": 2},
        1e7,
        {"experts": FUSED, "nested": True, "shards": 2, "dtype": "bfloat16"},
        "model.layers.2.linear_attn.in_proj_qkv.weight",
    ),
    "qwen3_5_moe_single": (
        "qwen3_5_moe_text",
        {**DELTA, **EXPERTS, **SHARED, "num_hidden_layers": 1, "head_dim": 8, "full_attention_interval": 1},
        1e6,
        {"experts": SINGLE, "fraction": 0.5, "dtype": "bfloat16"},
        f"model.layers.0.{GATE_UP}",
    ),
}


def versions() -> np.ndarray:
    return np.array([f"torch {torch.__version__}", f"transformers {transformers.__version__}"])


def case(model, seed: int) -> dict[str, np.ndarray]:
    """What a file of a model holds."""
    family, changes, theta, stored, watched = model
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": theta}
    if family.startswith("qwen3_5"):
        rope["partial_rotary_factor"] = stored.get("fraction", 0.25)
    config = CONFIGS[family](**{**SIZES, **changes}, rope_parameters=rope)
    net = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    dtype = getattr(torch, stored.get("dtype", "float32"))
    for parameter in net.parameters():  # gains too, which start at one or zero
        parameter.data.add_(0.15 * torch.randn_like(parameter))
        parameter.data = parameter.data.to(dtype).float()
    net.tie_weights()
    ids = torch.randint(0, VOCABULARY, (2, TIME))
    logits = net(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
    loss.backward()
    gradient = dict(net.named_parameters())[watched].grad
    with tempfile.TemporaryDirectory() as directory:
        store(Path(directory), net, config, stored, dtype)
        files = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    return {
        **{f"file.{name}": np.frombuffer(data, np.uint8) for name, data in files.items()},
        "ids": ids.numpy(),
        "logits": logits.detach().numpy(),
        "watched": np.array(watched),
        "gradient": gradient.numpy(),
        "versions": versions(),
    }


def store(directory: Path, net, config, stored: dict, dtype) -> None:
    """Writes the checkpoint as `stored` says."""
    tied = config.tie_word_embeddings
    found = {}
    for name, value in net.state_dict().items():
        if stored.get("experts") == SINGLE and ".experts." in name:
            base, _, kind = name.rpartition(".")
            for i, expert in enumerate(value):
                parts = {"down_proj": expert}
                if kind == "gate_up_proj":
                    parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
                found |= {f"{base}.{i}.{part}.weight": weight for part, weight in parts.items()}
        elif name != "lm_head.weight" or not tied or stored.get("spare_head"):
            found[name] = value
    settings = config.to_dict() | {"architectures": [type(net).__name__], "dtype": str(dtype).removeprefix("torch.")}
    if stored.get("old_rope"):
        settings["rope_theta"] = settings.pop("rope_parameters")["rope_theta"]
    if stored.get("nested"):
        found = {name.replace("model.", "model.language_model.", 1): value for name, value in found.items()}
        found |= {f"model.visual.blocks.{i}.weight": torch.ones(2) for i in range(3)} | {"mtp.fc.weight": torch.ones(1)}
        kind = settings["model_type"].removesuffix("_text")
        settings = {"model_type": kind, "text_config": settings, "vision_config": {}, "tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps(settings, indent=1))
    found = {name: value.to(dtype).clone().contiguous() for name, value in found.items()}
    count = stored.get("shards", 1)
    if count == 1:
        safetensors.torch.save_file(found, directory / "model.safetensors", metadata={"format": "pt"})
        return
    placed = {name: f"model-{i % count + 1:05d}-of-{count:05d}.safetensors" for i, name in enumerate(found)}
    for file in sorted(set(placed.values())):
        mine = {name: value for name, value in found.items() if placed[name] == file}
        safetensors.torch.save_file(mine, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def drawn(seed: int):
    """A random model, in the form of `MODELS`."""
    rng = np.random.default_rng(seed)

    def pick(*values):
        return values[int(rng.integers(len(values)))]

    family = list(CONFIGS)[seed % len(CONFIGS)]
    gated = family.startswith("qwen3_5")
    kv = pick(1, 2, 3)
    settings = {
        "hidden_size": pick(24, 48) if family == "llama" else pick(24, 32, 40),  # Llama wants a multiple of the heads
        "num_key_value_heads": kv,
        "num_attention_heads": kv * pick(1, 2, 4),
        "head_dim": pick(8, 16) if gated else pick(6, 8, 10),
        "num_hidden_layers": pick(1, 2, 3, 5),
        "tie_word_embeddings": pick(True, False),
        "rms_norm_eps": pick(1e-5, 1e-6),
    }
    layers, watched = settings["num_hidden_layers"], Q
    fraction = pick(0.25, 0.5, 0.75)
    fraction = 0.5 if settings["head_dim"] * fraction % 2 else fraction
    if "moe" in family:
        count = pick(2, 5, 8)
        settings |= {"num_experts": count, "num_experts_per_tok": min(count, pick(1, 2, 4))}
        settings |= {"moe_intermediate_size": pick(8, 12)}
        settings |= SHARED if gated else {"norm_topk_prob": pick(True, False)}
        watched = GATE_UP
    else:
        settings["intermediate_size"] = pick(20, 36)
    if gated:
        key_heads = pick(1, 2)
        settings |= {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": key_heads * pick(1, 2),
            "linear_key_head_dim": pick(4, 8),
            "linear_value_head_dim": pick(4, 6),
            "linear_conv_kernel_dim": pick(2, 4),
            "full_attention_interval": min(pick(1, 2, 3), layers),
        }
        watched = "self_attn.q_proj.weight" if "moe" not in family else watched
    interval = settings.get("full_attention_interval", 1)
    stored = {
        "experts": pick(FUSED, SINGLE),
        "shards": pick(1, 3),
        "nested": gated and pick(True, False),
        "old_rope": not gated and pick(True, False),
        "fraction": fraction,
        "dtype": pick("float32", "bfloat16"),
    }
    layer = interval - 1 if watched == Q else layers - 1
    return family, settings, float(pick(1e4, 5e5, 1e7)), stored, f"model.layers.{layer}.{watched}"


def opened(directory: str):
    """A checkpoint as `transformers` reads it, refusing what it does not find or does not know."""
    net, told = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not told.get(key), (directory, key, told[key])
    return net.eval()


def logits_of(net) -> np.ndarray:
    ids = torch.arange(2 * TIME).reshape(2, TIME) % net.config.vocab_size
    with torch.no_grad():
        return net(ids).logits.numpy()


def main(words: list[str]) -> None:
    if not words:
        GOLDEN.mkdir(exist_ok=True)
        for name, model in MODELS.items():
            np.savez_compressed(GOLDEN / f"model_{name}.npz", **case(model, 0))
    elif words[0] == "random":
        for seed in range(int(words[2])):
            np.savez(Path(words[1]) / f"{seed:03d}.npz", **case(drawn(seed), seed))
    elif words[0] == "open":
        np.savez(words[1], **{str(i): logits_of(opened(d)) for i, d in enumerate(words[2:])})
    elif words[0] == "adapt":
        import peft

        net = peft.PeftModel.from_pretrained(opened(words[2]), words[3])
        stored = safetensors.torch.load_file(Path(words[3]) / "adapter_model.safetensors")
        known = peft.get_peft_model_state_dict(net)
        assert set(known) == set(stored), set(known) ^ set(stored)
        assert all(torch.equal(known[name], stored[name]) for name in stored)
        np.savez(words[1], logits=logits_of(net))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
