"""config.json of Hugging Face checkpoints <-> `PolicyConfig`.

Read are the settings that say which arrays there are and what is computed with them; whatever changes the computation
and is not ours is refused by its name. Rotary settings stand in `rope_parameters`, or at the top level as older files
have them; those of vision-language checkpoints are under `text_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trace_jax.config import ConfigError, PolicyConfig
from trace_jax.config_rules_policy import ATTENTION, DELTA, RANGES, check_policy, mixers, outside

LLAMA, QWEN3, QWEN3_MOE = "llama", "qwen3", "qwen3_moe"
QWEN3_5, QWEN3_5_MOE = "qwen3_5_text", "qwen3_5_moe_text"
NESTED = {"qwen3_5": QWEN3_5, "qwen3_5_moe": QWEN3_5_MOE}  # with a vision model, which is left out
ARCHITECTURES = {
    LLAMA: "LlamaForCausalLM",
    QWEN3: "Qwen3ForCausalLM",
    QWEN3_MOE: "Qwen3MoeForCausalLM",
    QWEN3_5: "Qwen3_5ForCausalLM",
    QWEN3_5_MOE: "Qwen3_5MoeForCausalLM",
}
_CLASSES = ("ForCausalLM", "Model", "TextModel", "ForConditionalGeneration")  # whose language model is the same
RUNTIME = ("dtype", "param_dtype", "remat", "max_length")  # fields of a policy that a checkpoint does not fix
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GATED = (QWEN3_5, QWEN3_5_MOE)  # gated attention and delta layers, offset norms
_SPARSE = (QWEN3_MOE, QWEN3_5_MOE)
_MIXERS = {"full_attention": ATTENTION, "linear_attention": DELTA}
_DELTA = {
    "delta_key_heads": "linear_num_key_heads",
    "delta_value_heads": "linear_num_value_heads",
    "delta_key_dim": "linear_key_head_dim",
    "delta_value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
# Absent from a config.json, these have the value that `transformers` takes then.
_SWITCHES = ("tie_word_embeddings", "norm_topk_prob")
# Of relatives, or of code that a checkpoint brings along: with a value they scale, cap or skip something.
_STRANGE = (
    *("logit_scale", "logits_scaling", "final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"),
    *("residual_multiplier", "embedding_multiplier", "attention_multiplier", "clip_qkv", "no_rope_layers"),
)
_HEAD_DIM = {QWEN3: 128, QWEN3_5: 256, QWEN3_5_MOE: 256}
_QUARTER = 0.25
_OTHER = "choose another checkpoint"


def text_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the language model, with `model_type` one of `ARCHITECTURES`.

    Raises:
        ConfigError: another architecture.
    """
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in NESTED:
        text = dict(settings)
    else:
        nested = settings.get("text_config")
        if not isinstance(nested, Mapping):
            raise ConfigError(f"import: config.json of model_type {kind!r} has no `text_config`: copy it again")
        tied = settings.get("tie_word_embeddings", nested.get("tie_word_embeddings", False))
        if nested.get("model_type", NESTED[kind]) not in (kind, NESTED[kind]):
            raise ConfigError(
                f"import: config.json is of model_type {kind!r} and its `text_config` of "
                f"{_short(nested['model_type'])}: copy it again"
            )
        outer = ("dtype", "torch_dtype", "quantization_config", "compression_config", "rope_scaling", "architectures")
        types = {key: settings[key] for key in (*outer, "auto_map") if settings.get(key)}
        ids = {key: settings[key] for key in TOKENS if settings.get(key) is not None}
        text = types | ids | dict(nested) | {"tie_word_embeddings": tied, "model_type": NESTED[kind]}
    if not isinstance(kind, str) or text["model_type"] not in ARCHITECTURES:
        known = ", ".join([*ARCHITECTURES, *NESTED])
        raise ConfigError(f"import: model_type {_short(kind)} is not supported: use one of {known}")
    return text


def policy_config(settings: Mapping[str, Any]) -> PolicyConfig:
    """The policy that a config.json describes; `max_length` is the longest it was made for, `dtype` that of its file,
    `vocab_size` is 0 where the file does not say.

    Raises:
        ConfigError: another architecture, a variant that changes the computation, sizes that are missing or do not fit.
    """
    text = text_settings(settings)
    kind = text["model_type"]
    rope = _rope(text)
    _refuse_variants(text, rope, kind)
    heads, layers = _whole(text, "num_attention_heads"), _whole(text, "num_hidden_layers")
    _check_range("layers", layers)  # before there is a list of them
    width = _whole(text, "hidden_size")
    kinds = _layers(text, layers, kind)
    sizes: dict[str, Any] = {}
    if kind in _SPARSE:
        names = [name for name in ("num_experts", "num_local_experts") if text.get(name) is not None]
        if len({text[name] for name in names if isinstance(text[name], int)}) > 1:
            raise ConfigError("import: num_experts and num_local_experts of config.json differ: mend one")
        sizes |= {
            "mlp_width": 0,
            "experts": _whole(text, next(iter(names), "num_experts")),
            "experts_per_token": _whole(text, "num_experts_per_tok"),
            "expert_width": _whole(text, "moe_intermediate_size"),
            "norm_topk_prob": kind == QWEN3_5_MOE or text.get("norm_topk_prob") is True,
        }
    else:
        sizes["mlp_width"] = _whole(text, "intermediate_size")
    if kind == QWEN3_5_MOE:
        sizes["shared_expert_width"] = _whole(text, "shared_expert_intermediate_size")
    if DELTA in kinds:
        sizes |= {ours: _whole(text, theirs) for ours, theirs in _DELTA.items()}
    fraction = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    default = _QUARTER if kind in _GATED else 1.0
    dtype = text.get("dtype") or text.get("torch_dtype") or "float32"
    cfg = PolicyConfig(
        vocab_size=_whole(text, "vocab_size") if "vocab_size" in text else 0,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=_whole(text, "num_key_value_heads") if text.get("num_key_value_heads") is not None else heads,
        head_dim=_whole(text, "head_dim") if text.get("head_dim") is not None else _HEAD_DIM.get(kind, width // heads),
        rope_theta=_number(rope.get("rope_theta", text.get("rope_theta", 10000.0)), "rope_theta"),
        norm_eps=_number(text.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        qk_norm=kind != LLAMA,
        tie_embeddings=text.get("tie_word_embeddings") is True,
        rotary_fraction=default if fraction is None else _number(fraction, "partial_rotary_factor"),
        attention_gate=kind in _GATED,
        norm_offset=kind in _GATED,
        mixers=_pattern(kinds),
        max_length=_whole(text, "max_position_embeddings"),
        dtype=dtype if dtype == "float32" else "bfloat16",
        **sizes,
    )
    for name in RANGES:
        section, _, field = name.partition(".")
        if section == "policy" and field != "max_length":  # of which a run takes a part
            _check_range(field, getattr(cfg, field))
    try:
        check_policy(cfg)
    except ConfigError as error:
        raise ConfigError(f"import: config.json: {error}") from None
    return cfg


def _check_range(field: str, value: float) -> None:
    if bounds := outside(value, *RANGES[f"policy.{field}"]):
        raise ConfigError(f"import: config.json: `policy.{field}` is {value}: it must be {bounds}")


def tokens(text: Mapping[str, Any]) -> dict[str, Any]:
    """Ids that a config.json names, see `TOKENS`.

    Raises:
        ConfigError: one is no id.
    """
    found = {name: text[name] for name in TOKENS if text.get(name) is not None}
    for name, value in found.items():
        if not all(type(i) is int for i in (value if isinstance(value, list) else [value])):
            raise ConfigError(f"import: {name} {_short(value)} of config.json is no id of a token: copy it again")
    return found


def kind_of(cfg: PolicyConfig) -> str:
    """The `model_type` whose computation a policy's is.

    Raises:
        ConfigError: no architecture has its blocks.
    """
    gated = DELTA in mixers(cfg) or cfg.attention_gate or cfg.norm_offset or cfg.rotary_fraction != 1
    found = (QWEN3_5_MOE if cfg.experts else QWEN3_5) if gated else QWEN3_MOE if cfg.experts else QWEN3
    found = LLAMA if found == QWEN3 and not cfg.qk_norm else found
    gates = found in _GATED
    wanted = {"qk_norm": found != LLAMA, "attention_gate": gates, "norm_offset": gates}
    if cfg.experts:
        wanted["norm_topk_prob"] = True if gates else cfg.norm_topk_prob
    for name, value in wanted.items():
        if getattr(cfg, name) != value:
            raise ConfigError(
                f"export: `policy.{name}` {str(not value).lower()} beside this policy's other blocks is no "
                f"architecture of Hugging Face ({found} has {str(value).lower()}): such a policy stays here"
            )
    if cfg.experts and bool(cfg.shared_expert_width) != gates:
        raise ConfigError(
            f"export: `policy.shared_expert_width` {cfg.shared_expert_width} is no architecture of Hugging Face beside "
            f"this policy's other blocks ({found}): such a policy stays here"
        )
    return found


def config_json(cfg: PolicyConfig, vocab_size: int, dtype: str | None = None) -> dict[str, Any]:
    """The config.json of a policy, as `transformers` opens it.

    Args:
        dtype: type in which it is to be used; default: the compute type.

    Raises:
        ConfigError: see `kind_of`.
    """
    kind = kind_of(cfg)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    settings: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": vocab_size,
        "hidden_size": cfg.width,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_parameters": rope,
        "max_position_embeddings": cfg.max_length,
        "tie_word_embeddings": cfg.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype or cfg.dtype,
    }
    if kind in _GATED:
        names = {ours: theirs for theirs, ours in _MIXERS.items()}
        settings["layer_types"] = [names[mixer] for mixer in mixers(cfg)]
        rope["partial_rotary_factor"] = settings["partial_rotary_factor"] = cfg.rotary_fraction
        settings["attn_output_gate"] = True
        if DELTA in mixers(cfg):
            settings |= {theirs: getattr(cfg, ours) for ours, theirs in _DELTA.items()}
    else:
        settings["use_sliding_window"] = False
    if not cfg.experts:
        return settings | {"intermediate_size": cfg.mlp_width} | ({"mlp_bias": False} if kind == LLAMA else {})
    settings |= {
        "num_experts": cfg.experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "moe_intermediate_size": cfg.expert_width,
    }
    if kind == QWEN3_5_MOE:
        return settings | {"shared_expert_intermediate_size": cfg.shared_expert_width}
    return settings | {"norm_topk_prob": cfg.norm_topk_prob, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _refuse_variants(text: Mapping[str, Any], rope: Mapping[str, Any], kind: str) -> None:
    kept = {  # name -> whether its value is ours
        "attention_bias": not text.get("attention_bias"),
        "mlp_bias": not text.get("mlp_bias"),
        "use_sliding_window": not text.get("use_sliding_window"),
        "hidden_act": text.get("hidden_act", "silu") in ("silu", "swish"),  # two names of one
        "quantization_config": not text.get("quantization_config"),
        "compression_config": not text.get("compression_config"),
        "mlp_only_layers": not text.get("mlp_only_layers"),
        "decoder_sparse_step": text.get("decoder_sparse_step", 1) == 1,
        "attn_output_gate": kind not in _GATED or text.get("attn_output_gate", True) is True,
    }
    kept |= {name: text.get(name) in (None, False, 1) for name in _STRANGE}
    for name, ours in kept.items():
        if not ours:
            raise ConfigError(f"import: {name} {_short(text.get(name))} of config.json is not supported: {_OTHER}")
    for name in _SWITCHES:
        if not isinstance(text.get(name), bool | None):
            raise ConfigError(f"import: {name} {_short(text[name])} of config.json is not true or false: mend it there")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        where = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
        raise ConfigError(f"import: rope_type {_short(rope_type)} in {where} of config.json is not supported: {_OTHER}")
    fraction = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    if kind not in _GATED and fraction not in (None, 1, 1.0):
        raise ConfigError(
            f"import: partial_rotary_factor {_short(fraction)} of config.json is not supported by {kind}: {_OTHER}"
        )
    _refuse_classes(text, kind)


def _refuse_classes(text: Mapping[str, Any], kind: str) -> None:
    """Refuses classes that put something else on the language model (a score, a draft), or bring code along."""
    stem = ARCHITECTURES[kind].removesuffix("ForCausalLM")
    known = {f"{stem}{end}".lower() for end in _CLASSES}
    given = text.get("architectures")
    if given is not None:
        names = given if isinstance(given, list) else [given]
        if not all(isinstance(name, str) and name.lower() in known for name in names):
            raise ConfigError(
                f"import: architectures {_short(given)} of config.json is not supported: {kind} is read as "
                f"{ARCHITECTURES[kind]}"
            )
    code = text.get("auto_map")
    if isinstance(code, Mapping) and any(name in code for name in ("AutoModel", "AutoModelForCausalLM")):
        raise ConfigError(
            f"import: the checkpoint brings code of its own (auto_map in config.json), which is not run: {_OTHER}"
        )


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings; of both spellings `transformers` uses the older one."""
    name = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    found = text.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"import: {name} {_short(found)} of config.json is no object: copy it again")
    if any(isinstance(value, Mapping) for value in found.values()):
        raise ConfigError(f"import: {name} of config.json differs between layers, which is not supported: {_OTHER}")
    return found


def _layers(text: Mapping[str, Any], layers: int, kind: str) -> tuple[str, ...]:
    """What mixes tokens in each layer."""
    types = text.get("layer_types")
    if types is None and kind in _GATED:
        every = _whole(text, "full_attention_interval") if text.get("full_attention_interval") is not None else 4
        types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    if types is None:
        return (ATTENTION,) * layers
    known = _MIXERS if kind in _GATED else {"full_attention": ATTENTION}
    if not isinstance(types, list) or len(types) != layers or not all(isinstance(t, str) for t in types):
        raise ConfigError(f"import: layer_types of config.json is no list of {layers} names: copy it again")
    if other := [t for t in types if t not in known]:
        raise ConfigError(f"import: {_short(other[0])} in layer_types of config.json is not supported")
    return tuple(known[t] for t in types)


def _pattern(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest pattern that, repeated and cut, gives these layers."""
    count = len(kinds)
    return next(kinds[:n] for n in range(1, count + 1) if all(kinds[i] == kinds[i % n] for i in range(count)))


def _whole(text: Mapping[str, Any], name: str) -> int:
    if name not in text:
        raise ConfigError(f"import: config.json lacks {name!r}: copy it again")
    value = text[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ConfigError(f"import: {name} {_short(value)} of config.json is no whole number above 0: copy it again")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise ConfigError(f"import: {name} {_short(value)} of config.json is no number above 0: copy it again")
    return float(value)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
