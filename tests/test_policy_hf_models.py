"""Open checkpoints of every family: logits and gradients of `transformers`, and import -> export byte for byte."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors
from helpers_models import NAMES, agree, checkpoint, golden

from trace_jax.policy import hf, hf_config, hf_files
from trace_jax.policy.hf_read import read, resolve
from trace_jax.policy.hf_write import params_of, planned


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_a_gradient_of_transformers(name, tmp_path):
    stored = golden(name)
    agree(stored, checkpoint(stored, tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_what_was_read_is_written_byte_for_byte(name, tmp_path):
    """Every tensor of the language model, in the type, shape and bytes that it had, in several files."""
    source = hf_files.SafetensorFiles(checkpoint(golden(name), tmp_path / "in"))
    model = hf.load_model(tmp_path / "in")
    found = resolve(source, model.cfg, model.vocab_size)
    tensors = planned(params_of(model), model.cfg, model.vocab_size, found.origin)
    (tmp_path / "out").mkdir()
    files = hf_files.shards(tensors, 10_000)
    assert len(files) > 2
    for file, group in files.items():
        hf_files.write(tmp_path / "out" / file, group)
        if len(group) > 1:
            assert (tmp_path / "out" / file).stat().st_size < 10_000 + 4096
    names = {t.name if t.name == "lm_head.weight" else f"model.{t.name}": old for t, old in found.names}
    written = hf_files.SafetensorFiles(tmp_path / "out").entries
    assert set(written) == set(names)
    old_files = hf_files.SafetensorFiles(tmp_path / "in")
    for new, old in names.items():
        before, after = old_files.entries[old], written[new]
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        with open(before.file, "rb") as a, open(after.file, "rb") as b:
            a.seek(before.begin), b.seek(after.begin)
            assert a.read(before.end - before.begin) == b.read(after.end - after.begin), new


def test_the_safetensors_package_reads_what_is_written(tmp_path):
    """An independent reader; odd sizes of two types in one file."""
    values = {"b": np.arange(5, dtype=np.float32), "a": np.full((3, 1), 0.5, np.float16), "c": np.float32([[7]])}
    kinds = {"b": "F32", "a": "F16", "c": "F32"}
    hf_files.write(
        tmp_path / "x.safetensors",
        {n: hf_files.Planned(kinds[n], v.shape, lambda v=v: v) for n, v in values.items()},
    )
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        assert set(file.keys()) == set(values) and file.metadata() == {"format": "pt", "producer": "trace-jax"}
        for name, value in values.items():
            assert np.array_equal(file.get_tensor(name), value) and file.get_tensor(name).dtype == value.dtype


def settings_of(name: str) -> dict:
    return json.loads(golden(name)["file.config.json"].tobytes())


@pytest.mark.parametrize("name", NAMES)
def test_config_json_survives_the_way_out_and_in(name):
    cfg = hf.policy_config(settings_of(name))
    assert hf.policy_config(hf.config_json(cfg, cfg.vocab_size)) == cfg


def test_layers_and_rotary_share_of_config_json():
    moe = settings_of("qwen3_5_moe")
    assert hf.policy_config(moe).mixers == ("delta", "attention")
    text = hf_config.text_settings(moe) | {"num_hidden_layers": 9}
    text["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * 2 + ["linear_attention"]
    cfg = hf.policy_config(text)
    assert cfg.mixers == ("delta", "delta", "delta", "attention")
    del text["layer_types"], text["rope_parameters"]["partial_rotary_factor"]
    assert hf.policy_config(text) == cfg  # both are the defaults of the architecture
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    assert hf.policy_config(text) == cfg
    assert hf.policy_config(text | {"partial_rotary_factor": 0.5}).rotary_fraction == 0.5
    qwen = settings_of("qwen3")
    del qwen["head_dim"]
    assert hf.policy_config(qwen).head_dim == 128 and hf.policy_config(qwen | {"head_dim": 4}).head_dim == 4


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        ("llama", {"model_type": "qwen2"}, "model_type 'qwen2'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3' in rope_scaling"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"compression_config": {"format": "int"}}, "compression_config"),
        ("llama", {"hidden_size": "32"}, "hidden_size '32'"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling 8.0"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures .*Sequence"),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
        ("llama", {"model_type": ["llama"]}, "model_type"),
        ("llama", {"num_hidden_layers": 2**31 - 1}, "`policy.layers` is 2147483647"),
        ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn' in rope_scaling"),
        ("qwen3", {"tie_word_embeddings": "false"}, "tie_word_embeddings 'false'"),
        ("qwen3_moe", {"norm_topk_prob": "false"}, "norm_topk_prob 'false'"),
        ("qwen3_moe", {"num_experts": 6, "num_local_experts": 8}, "differ"),
        ("qwen3_5_moe", {"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ("llama", {"num_key_value_heads": 3}, "multiple of `policy.kv_heads`"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("qwen3", {"layer_types": ["full_attention"]}, "no list of 2 names"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window True"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "experts_per_token"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate False"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 2}, "no attention"),
        ("qwen3_5_moe", {"text_config": None}, "text_config"),
    ],
)
def test_variants_are_refused_by_name(name, changes, word):
    with pytest.raises(hf_config.ConfigError, match="import: .*" + word) as caught:
        hf.policy_config(settings_of(name) | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("llama", {"attention_gate": True}, "qk_norm"),
        ("qwen3_5", {"norm_offset": False}, "norm_offset"),
        ("qwen3_5_moe", {"shared_expert_width": 0}, "shared_expert_width"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen3_moe", {"shared_expert_width": 8}, "shared_expert_width"),
    ],
)
def test_policies_that_are_no_architecture_are_not_exported(name, changes, word):
    cfg = dataclasses.replace(hf.policy_config(settings_of(name)), **changes)
    with pytest.raises(hf_config.ConfigError, match=f"export: .*{word}"):
        hf.config_json(cfg, 96)


def rewritten(directory, change) -> None:
    """The checkpoint with other tensors: `change` takes and gives arrays by name."""
    files = hf_files.SafetensorFiles(directory)
    arrays = change({name: np.array(files.array(name)) for name in files.entries})
    dtype = hf_files.common(e.dtype for e in files.entries.values())
    tensors = {n: hf_files.Planned(dtype, a.shape, lambda a=a: a) for n, a in arrays.items()}
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    hf_files.write(directory / "model.safetensors", tensors)


NORM = "model.layers.1.self_attn.q_norm.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("qwen3", lambda a: {n: v for n, v in a.items() if n != NORM}, f"no tensor '{NORM}'"),
        ("qwen3", lambda a: a | {NORM: a[NORM][:5]}, r"q_norm.weight is \[5\] on disk, config.json says \[12\]"),
        ("qwen3", lambda a: a | {"model.layers.0.self_attn.q_proj.bias": a[NORM]}, r"lacks \(model.layers.0.*q_proj.b"),
        ("qwen3", lambda a: a | {"model.norm.bias": a[NORM]}, r"lacks \(model.norm.bias"),
        ("qwen3", lambda a: a | {"lm_head.bias": a[NORM]}, r"lacks \(lm_head.bias"),
        ("qwen3", lambda a: a | {NORM: a[NORM] * np.float32(np.nan)}, "q_norm.weight holds NaN"),
        (
            "qwen3_moe",
            lambda a: a | {EXPERT: np.full_like(a[EXPERT], np.inf)},
            "3.up_proj.weight holds NaN or inf",
        ),
        ("qwen3", lambda a: a | {"model.layers.2.self_attn.q_norm.weight": a[NORM]}, r"model.layers.2"),
        ("llama", lambda a: a | {"lm_head.weight": a["lm_head.weight"] + 1}, "differs from model.embed_tokens"),
    ],
)
def test_wrong_tensors_are_named(name, change, word, tmp_path):
    rewritten(checkpoint(golden(name), tmp_path), change)
    with pytest.raises(hf_config.ConfigError, match=word) as caught:
        hf.load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_float64_is_rounded_and_said_so_and_goes_out_in_float32(tmp_path):
    directory = checkpoint(golden("llama"), tmp_path)
    source = hf_files.SafetensorFiles(directory)
    tensors = {
        n: hf_files.Planned("F64", e.shape, lambda n=n: source.array(n).astype(np.float64))
        for n, e in source.entries.items()
    }
    hf_files.write(directory / "wide.safetensors", tensors)
    (directory / "wide.safetensors").rename(directory / "model.safetensors")
    cfg = hf.policy_config(settings_of("llama"))
    found = resolve(hf_files.SafetensorFiles(directory), cfg, cfg.vocab_size)
    assert found.origin.dtype == "F32" and not found.origin.others
    assert "rounded to float32" in found.notes[0]


def test_a_header_that_lies_is_refused(tmp_path):
    """Places that overlap, leave gaps or are no whole numbers; more bytes than tensors; JSON without an end."""
    path = tmp_path / "model.safetensors"
    values = {name: np.full(4, i, np.float32) for i, name in enumerate("ab")}
    hf_files.write(path, {n: hf_files.Planned("F32", v.shape, lambda v=v: v) for n, v in values.items()})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]

    def lying(places, more=b"") -> None:
        text = json.dumps(header | {"b": header["b"] | {"data_offsets": places}}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data + more)

    lying([16, 32])
    assert np.array_equal(hf_files.SafetensorFiles(tmp_path).array("b"), values["b"])
    for places, more, word in (
        ([0, 16], b"", "b does not begin where"),
        ([20, 36], bytes(4), "b does not begin where"),
        ([16, 32], b"x", "1 bytes too many"),
        ([16.0, 32.0], b"", "its header"),
        (["16", "32"], b"", "its header"),
        ([16], b"", "its header"),
    ):
        lying(places, more)
        with pytest.raises(hf_config.ConfigError, match=f"model.safetensors is damaged .*{word}"):
            hf_files.SafetensorFiles(tmp_path)
    path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    with pytest.raises(hf_config.ConfigError, match="its header"):
        hf_files.SafetensorFiles(tmp_path)


def test_files_that_are_missing_or_cut(tmp_path):
    directory = checkpoint(golden("qwen3"), tmp_path)
    last = sorted(directory.glob("model-*"))[-1]
    content = last.read_bytes()
    for damage, word in (
        (content[:-1], "cut off"),
        (content[:5], "cut off"),
        (b"\x02" + bytes(63), "header"),
        (b"", "cut"),
    ):
        last.write_bytes(damage)
        with pytest.raises(hf_config.ConfigError, match=f"{last.name} is damaged.*{word}"):
            hf.load_model(directory)
    last.unlink()
    with pytest.raises(hf_config.ConfigError, match=f"{last.name} is missing"):
        hf.load_model(directory)
    (directory / "model.safetensors.index.json").write_text("{")
    with pytest.raises(hf_config.ConfigError, match="index.json is damaged"):
        hf.load_model(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(hf_config.ConfigError, match="index.json is damaged"):
        hf.load_model(directory)


def test_tensors_beside_the_language_model_are_counted_and_strange_ones_named(tmp_path):
    directory = checkpoint(golden("qwen3_5_moe"), tmp_path)
    cfg = hf.policy_config(settings_of("qwen3_5_moe"))
    notes = resolve(hf_files.SafetensorFiles(directory), cfg, cfg.vocab_size).notes
    assert notes == ["tensors left out: 3 of vision, 1 of multi-token prediction"]
    rewritten(directory, lambda a: a | {f"odd.{i}": a["mtp.fc.weight"] for i in range(5)})
    notes = resolve(hf_files.SafetensorFiles(directory), cfg, cfg.vocab_size).notes
    assert notes[1] == "5 unknown tensors left out: odd.0, odd.1, odd.2, ..."


def test_a_checkpoint_is_read_a_part_at_a_time(tmp_path):
    """All is known to be there before anything is read; then every tensor is read once, as a view of its file."""
    directory = checkpoint(golden("qwen3_moe"), tmp_path)
    cfg = hf.policy_config(settings_of("qwen3_moe"))
    source = hf_files.SafetensorFiles(directory)
    order, plain = [], source.array
    source.array = lambda name: order.append(name) or plain(name)
    found = resolve(source, cfg, cfg.vocab_size)
    assert not order
    read(source, found, cfg, cfg.vocab_size)
    assert sorted(order) == sorted(name for _, name in found.names)
    assert not plain("lm_head.weight").flags.owndata  # a view of the file
