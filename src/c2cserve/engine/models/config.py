"""A checkpoint's config.json, normalised. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.core.tensors import ITEM_BYTES, Dtype
from c2cserve.files.reading import CONFIG_BYTES_MAX, FileProblem, one_line, read_object

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("long_factor", "short_factor"),
}
_ROPE_LENGTH = "original_max_position_embeddings"
_ROPE_NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "mscale",
    "mscale_all_dim", "beta_fast", "beta_slow", _ROPE_LENGTH,
)  # fmt: skip
_ACTIVATIONS = ("silu", "swish")
_HEAD_DIM_MAX = 512
"""The largest head that the attention kernels take."""
_SIZES_MAX = {
    "num_hidden_layers": 2048, "hidden_size": 1 << 18, "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14, "head_dim": _HEAD_DIM_MAX, "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24, "max_position_embeddings": 1 << 30, "sliding_window": 1 << 30,
    "max_window_layers": 1 << 30, "num_experts": 1 << 12, "num_local_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12, "moe_intermediate_size": 1 << 22, "decoder_sparse_step": 2048,
}  # fmt: skip
"""Several times what any published model has. A config far beyond is a mistake or an attack, and
planning for it would take all memory before a tensor is found missing."""
_EXPERTS_MAX = 1 << 18
"""Experts of all layers together."""
_EOS_MAX = 1024
_SCALE_MAX = 1e6
_THETA_MAX = 1e15
_WRONG_KIND = (TypeError, ValueError, AttributeError, OverflowError, IndexError, RecursionError)
"""The exceptions of reading a config with values of any type."""


class ConfigError(ValueError):
    """The model cannot be served. One line says what is supported."""


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float = 10000.0
    type: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Moe:
    experts: int
    per_token: int
    intermediate: int
    renormalize: bool
    sparse: tuple[bool, ...]
    """Per layer: whether its MLP is a mixture of experts."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    norm_eps: float
    rope: Rope
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int, ...]
    """Per layer: tokens a query sees, 0 for all."""
    moe: Moe | None
    eos_token_ids: tuple[int, ...]
    dtype: Dtype

    @property
    def kv_block_bytes(self) -> int:
        """One block-first KV block: all layers, K and V, of `BLOCK_TOKENS` tokens."""
        per_layer = 2 * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]
        return self.layers * per_layer * BLOCK_TOKENS

    def sparse(self, layer: int) -> bool:
        return self.moe is not None and self.moe.sparse[layer]


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's config.json with generation_config.json's EOS ids, which chat models extend.
    Raises ConfigError."""
    path = directory / "config.json"
    try:
        raw = read_object(path, CONFIG_BYTES_MAX)
        generation = read_object(directory / "generation_config.json", CONFIG_BYTES_MAX) or {}
    except FileProblem as problem:
        raise ConfigError(str(problem)) from problem
    if raw is None:
        raise ConfigError(f"{path}: no such file; is this a checkpoint directory?")
    eos = generation.get("eos_token_id")
    return raw if eos is None else {**raw, "eos_token_id": eos}


def parse_config(raw: Mapping[str, Any], dtype: str = "auto") -> ModelConfig:
    """Normalise a config. `dtype` "auto" keeps the checkpoint's. Raises ConfigError for what is not
    supported."""
    try:
        arch = _architecture(raw)
        _refuse_unsupported(raw)
        config = _parse(raw, arch, dtype)
        _check(config)
    except ConfigError as error:
        raise ConfigError(one_line(error)) from error
    except KeyError as error:
        raise ConfigError(f"config.json lacks {one_line(error)}") from error
    except _WRONG_KIND as error:
        what = one_line(error)
        raise ConfigError(f"config.json holds a value of the wrong kind: {what}") from error
    return config


def _architecture(raw: Mapping[str, Any]) -> str:
    listed: object = raw.get("architectures") or []
    names: list[Any] = cast("list[Any]", listed) if isinstance(listed, list) else [listed]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError("architectures in config.json is not a list of names")
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise ConfigError(
        f"architecture {', '.join(names) or 'unknown'} is not supported; supported are "
        f"{', '.join(ARCHITECTURES)}{_other_kind(names, raw)}"
    )


def _other_kind(names: list[str], raw: Mapping[str, Any]) -> str:
    """Return what kind of model this is if it generates no text, or not from text alone."""
    if "vision_config" in raw or "audio_config" in raw or "text_config" in raw:
        return ". It is a multimodal model: serve a text model of the same family"
    if raw.get("is_encoder_decoder"):
        return ". It is an encoder with a decoder: only decoders are served"
    if any(name.endswith("ForConditionalGeneration") for name in names):
        return ". It reads more than text, or has an encoder: serve a decoder of texts"
    if names and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return ". It does not generate text"
    return ""


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(
            f"quantized weights ({method}) are not supported; serve the checkpoint that they were "
            "made from, in bfloat16 or float16"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"activation {activation!r} is not supported; supported is silu")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor other than 1 is not supported")


def _parse(raw: Mapping[str, Any], arch: str, dtype: str) -> ModelConfig:
    layers, heads, hidden = (
        _size(raw, key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    vocab = _size(raw, "vocab_size")
    if min(layers, heads, hidden) < 1:
        raise ConfigError(f"{layers} layers of {heads} heads and hidden size {hidden} is no model")
    kv_heads = _size(raw, "num_key_value_heads", 0) or heads
    usual_head_dim = 128 if arch == "qwen3" else hidden // heads
    head_dim = _size(raw, "head_dim", 0) or usual_head_dim
    takes_bias = arch in ("llama", "qwen3", "qwen3_moe")
    attention_bias = takes_bias and bool(raw.get("attention_bias", False))
    return ModelConfig(
        arch=arch,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_size(raw, "intermediate_size"),
        vocab=vocab,
        max_position=_size(raw, "max_position_embeddings"),
        norm_eps=float(raw["rms_norm_eps"]),
        rope=_rope(raw, arch),
        qkv_bias=arch == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=arch == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=arch in ("qwen3", "qwen3_moe"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        windows=_windows(raw, arch, layers),
        moe=_moe(raw, arch, layers),
        eos_token_ids=_eos(raw.get("eos_token_id"), vocab),
        dtype=_dtype(raw, dtype),
    )


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Read a count; null counts as absent. Raises KeyError, ConfigError."""
    value: object = raw.get(key)
    if value is None:
        value = raw[key] if default is None else default
    whole = isinstance(value, float) and value.is_integer()
    if isinstance(value, bool) or not (whole or isinstance(value, int)):
        raise ConfigError(f"{key} in config.json is {value!r}, not a whole number")
    if not 0 <= (size := int(cast("int", value))) <= _SIZES_MAX[key]:
        raise ConfigError(f"{key} in config.json is not between 0 and {_SIZES_MAX[key]}")
    return size


def _check(c: ModelConfig) -> None:
    """Check what the layout and the kernels rely on. Raises ConfigError."""
    if min(c.kv_heads, c.head_dim, c.intermediate, c.vocab, c.max_position) < 1:
        raise ConfigError("config.json holds a size that is not positive")
    if c.heads % c.kv_heads:
        raise ConfigError(f"{c.heads} heads are not a multiple of {c.kv_heads} key-value heads")
    if c.head_dim % 2 or c.head_dim > _HEAD_DIM_MAX:
        raise ConfigError(
            f"head_dim {c.head_dim} is not supported; it can be an even number up to "
            f"{_HEAD_DIM_MAX}"
        )
    if len(c.windows) != c.layers:
        raise ConfigError(f"layer_types names {len(c.windows)} layers of {c.layers}")
    if not 0.0 <= c.norm_eps < 1.0:
        raise ConfigError(f"rms_norm_eps {c.norm_eps} is not between 0 and 1")
    if c.moe is not None:
        if not 1 <= c.moe.per_token <= c.moe.experts:
            raise ConfigError(f"{c.moe.per_token} experts per token out of {c.moe.experts}")
        if c.moe.experts * c.layers > _EXPERTS_MAX or c.moe.intermediate < 1:
            raise ConfigError(f"{c.layers} layers of {c.moe.experts} experts are not supported")
    _check_rope(c.rope, c.head_dim)


def _check_rope(rope: Rope, head_dim: int) -> None:
    """Check the numbers of rotary tables: an exception in making them would cost a slice."""
    if not 1.0 < rope.theta <= _THETA_MAX:
        raise ConfigError(f"rope_theta {rope.theta} is not between 1 and {_THETA_MAX:g}")
    numbers: dict[str, Any] = {name: rope.scaling.get(name) for name in _ROPE_NUMBERS}
    if rope.type == "longrope":
        for name in ("long_factor", "short_factor"):
            factors: Any = rope.scaling[name]
            if not isinstance(factors, list) or len(cast("list[Any]", factors)) != head_dim // 2:
                raise ConfigError(f"rope {name} must have head_dim / 2 = {head_dim // 2} numbers")
            numbers |= {f"{name}[{i}]": one for i, one in enumerate(cast("list[Any]", factors))}
    for name, value in numbers.items():
        if value is None:
            continue
        real = isinstance(value, int | float) and not isinstance(value, bool)
        most = _SIZES_MAX["max_position_embeddings"] if name == _ROPE_LENGTH else _SCALE_MAX
        if not real or not 0.0 < value <= most:
            raise ConfigError(f"rope {name} is {value!r}, not a number above 0, up to {most:g}")
    low, high = rope.scaling.get("low_freq_factor"), rope.scaling.get("high_freq_factor")
    if rope.type == "llama3" and not cast("float", low) < cast("float", high):
        raise ConfigError(f"rope low_freq_factor {low} is not below high_freq_factor {high}")
    if rope.type == "dynamic" and head_dim < 4:
        raise ConfigError(f"rope type 'dynamic' needs a head_dim of at least 4, not {head_dim}")
    length = rope.scaling.get(_ROPE_LENGTH)
    if rope.type in ("llama3", "yarn", "longrope") and length is not None and int(length) < 2:
        raise ConfigError(f"rope {_ROPE_LENGTH} is {length}, which is no context")


def _rope(raw: Mapping[str, Any], arch: str) -> Rope:
    """Read both ways of writing it: rope_theta + rope_scaling, and (newer) rope_parameters."""
    fields: dict[str, Any] = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    usual_theta = 1e6 if arch == "mixtral" else 1e4
    theta = float(fields.pop("rope_theta", None) or raw.get("rope_theta") or usual_theta)
    old_name = fields.pop("type", None)
    kind = str(fields.pop("rope_type", None) or old_name or "default")
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    for name in _ROPE_NEEDS.get(kind, ()):
        if fields.get(name) is None:
            raise ConfigError(f"rope type {kind!r} needs {name!r}")
    if fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor other than 1 is not supported")
    original = raw.get(_ROPE_LENGTH)
    if original is not None:
        fields.setdefault(_ROPE_LENGTH, original)
    return Rope(theta, kind, fields)


def _windows(raw: Mapping[str, Any], arch: str, layers: int) -> tuple[int, ...]:
    """Return the window of every layer.

    Mistral and Mixtral window all layers, Llama none. Qwen does only where use_sliding_window is
    set: Qwen2 and Qwen3 from max_window_layers on, Qwen3-MoE in all layers.
    """
    window = _size(raw, "sliding_window", 0)
    if arch == "llama" or (arch.startswith("qwen") and not raw.get("use_sliding_window", False)):
        return (0,) * layers
    if types := raw.get("layer_types"):
        if unknown := set(types) - {"sliding_attention", "full_attention"}:
            raise ConfigError(f"layer type {unknown.pop()!r} is not supported")
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    full = _size(raw, "max_window_layers", 28) if arch in ("qwen2", "qwen3") else 0
    return tuple(window if layer >= full else 0 for layer in range(layers))


def _moe(raw: Mapping[str, Any], arch: str, layers: int) -> Moe | None:
    if arch == "mixtral":
        experts, per_token = _size(raw, "num_local_experts"), _size(raw, "num_experts_per_tok")
        return Moe(experts, per_token, _size(raw, "intermediate_size"), True, (True,) * layers)
    if arch != "qwen3_moe":
        return None
    step = _size(raw, "decoder_sparse_step", 1)
    dense = set(cast("list[int]", raw.get("mlp_only_layers") or []))
    return Moe(
        experts=_size(raw, "num_experts", 0) or _size(raw, "num_local_experts"),
        per_token=_size(raw, "num_experts_per_tok"),
        intermediate=_size(raw, "moe_intermediate_size"),
        renormalize=bool(raw.get("norm_topk_prob", False)),
        sparse=tuple(i not in dense and step > 0 and (i + 1) % step == 0 for i in range(layers)),
    )


def _eos(value: object, vocab: int) -> tuple[int, ...]:
    """Return the end tokens. Ids beyond the vocabulary are left out: they are never sampled, and
    the sampler must not get them as ids to ban."""
    if value is None:
        return ()
    ids = cast("list[int]", value) if isinstance(value, list) else [cast("int", value)]
    if len(ids) > _EOS_MAX:
        raise ConfigError(f"{len(ids)} end tokens are not supported; {_EOS_MAX} are")
    return tuple(int(token) for token in ids if 0 <= int(token) < vocab)


def _dtype(raw: Mapping[str, Any], dtype: str) -> Dtype:
    wanted = dtype
    if dtype == "auto":
        wanted = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if wanted not in ("float32", "float16", "bfloat16"):
        raise ConfigError(f"dtype {wanted!r} is not supported; choose float32, float16 or bfloat16")
    return wanted
