"""GGUF files: a written one against its arrays. SmolLM2-135M itself is in tests/test_smollm2.py."""

from pathlib import Path

import numpy as np
import pytest

from trace_jax.config import ConfigError

gguf_package = pytest.importorskip("gguf")


from trace_jax.policy.gguf import GgufFile  # noqa: E402
from trace_jax.policy.hf_read import read, resolve  # noqa: E402

WIDTH, HEADS, KV, INNER, VOCABULARY = 64, 4, 2, 96, 50
ROWS = {"attn_q": (WIDTH, WIDTH), "attn_k": (KV * 16, WIDTH), "attn_v": (KV * 16, WIDTH), "attn_output": (WIDTH, WIDTH)}
ROWS |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}


def written(
    path: Path, arch: str = "llama", changes: dict | None = None, tied: bool = True, more: tuple = ()
) -> dict[str, np.ndarray]:
    """A file of one layer with Q8_0, Q4_1, F16 and F32 tensors; the arrays as any reader of it has them."""
    rng = np.random.default_rng(0)
    writer = gguf_package.GGUFWriter(str(path), arch)
    numbers = {
        "block_count": 1,
        "context_length": 256,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "vocab_size": VOCABULARY,
        "rope.dimension_count": 16,
    } | (changes or {})
    for name, value in numbers.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"{arch}.{name}", value)
    writer.add_float32(f"{arch}.rope.freq_base", 1e5)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    kinds = gguf_package.GGMLQuantizationType
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output_norm": (WIDTH,), "blk.0.attn_norm": (WIDTH,)}
    shapes |= {"blk.0.ffn_norm": (WIDTH,)} | {f"blk.0.{name}": shape for name, shape in ROWS.items()}
    shapes |= {} if tied else {"output": (VOCABULARY, WIDTH)}
    shapes |= {name: (16,) for name in more}
    found = {}
    for name, shape in shapes.items():
        value = rng.normal(size=shape).astype(np.float32)
        kind = {"token_embd": kinds.Q8_0, "blk.0.ffn_up": kinds.Q4_1, "blk.0.attn_v": kinds.F16}.get(name, kinds.F32)
        data = gguf_package.quants.quantize(value, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        found[name] = np.asarray(gguf_package.quants.dequantize(data, kind), np.float32).reshape(shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_where_its_parameter_is(tmp_path, tied):
    """Query and key by the definition: output j of a head's first half is row 2j of the file, of its second 2j + 1."""
    arrays = written(tmp_path / "m.gguf", tied=tied)
    file = GgufFile(tmp_path / "m.gguf")
    cfg = file.config
    assert (cfg.layers, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.rope_theta, cfg.norm_eps) == (1, 4, 2, 16, 1e5, 1e-5)
    assert cfg.tie_embeddings == tied and not cfg.qk_norm and cfg.max_length == 256
    params = read(file, resolve(file, cfg, cfg.vocab_size), cfg, cfg.vocab_size)
    rows = [16 * head + 2 * (j % 8) + j // 8 for head in range(HEADS) for j in range(16)]
    plain = {"value": "attn_v", "output": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
    wanted = {ours: arrays[f"blk.0.{theirs}"].T for ours, theirs in plain.items()}
    wanted |= {"query": arrays["blk.0.attn_q"][rows].T, "key": arrays["blk.0.attn_k"][rows[: KV * 16]].T}
    wanted |= {"attention_norm": arrays["blk.0.attn_norm"], "mlp_norm": arrays["blk.0.ffn_norm"]}
    wanted = {name: value[None] for name, value in wanted.items()}
    wanted |= {"embedding": arrays["token_embd"], "final_norm": arrays["output_norm"]}
    wanted |= {} if tied else {"head": arrays["output"].T}
    assert set(wanted) == set(params)
    for name, value in wanted.items():
        assert np.array_equal(params[name], value), name


@pytest.mark.parametrize(
    ("arch", "changes", "word"),
    [
        ("qwen2", {}, "architecture 'qwen2'"),
        ("llama", {"rope.scaling.type": "yarn"}, "rope.scaling.type 'yarn'"),
        ("llama", {"rope.dimension_count": 8}, "rope.dimension_count"),
        ("llama", {"expert_count": 4}, "expert_count"),
        ("llama", {"attention.sliding_window": 64}, "attention.sliding_window"),
        ("llama", {"attention.value_length": 8}, "attention.value_length"),
        ("llama", {"attention.head_count_kv": 3}, "kv_heads"),
        ("llama", {"block_count": 0}, "block_count"),
        ("llama", {"block_count": 2}, "layers.1"),
        ("llama", {"block_count": 2**31}, "block_count is 2147483648"),
        ("llama", {"feed_forward_length": 64}, "gate_proj.weight is .* the metadata says"),
    ],
)
def test_files_that_are_not_read_are_refused_in_one_line(arch, changes, word, tmp_path):
    written(tmp_path / "m.gguf", arch, changes)
    with pytest.raises(ConfigError, match=word) as caught:
        file = GgufFile(tmp_path / "m.gguf")
        resolve(file, file.config, file.config.vocab_size)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("import: ")


@pytest.mark.parametrize("name", ["rope_freqs", "blk.0.attn_q_norm", "output_bias"])
def test_tensors_that_change_the_computation_are_refused(name, tmp_path):
    """rope_freqs scales the positions of Llama 3, without a word in the metadata."""
    written(tmp_path / "m.gguf", more=(name,))
    with pytest.raises(ConfigError, match=f"holds '{name}.weight'"):
        GgufFile(tmp_path / "m.gguf")


def test_damaged_files(tmp_path):
    path = tmp_path / "m.gguf"
    written(path)
    content = path.read_bytes()
    for data in (b"", b"GGUF", content[:200], content[:-500], b"x" * 500):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="no GGUF file, or a damaged one"):
            GgufFile(path)
    with pytest.raises(ConfigError, match="cannot read"):
        GgufFile(tmp_path / "none.gguf")
