"""What a checkpoint's ``config.json`` says about a model, as one frozen, torch-free value.

Four families share one dense decoder; the table below is all that differs between them. Where a
key is missing, the family's own default applies, the one ``transformers`` would take.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvferry.core.errors import ConfigError, ModelLoadError
from kvferry.models.rope_spec import RopeSpec, parse_rope

log = logging.getLogger(__name__)


class Family(StrEnum):
    """Supported architectures, by the name in ``config.json``."""

    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"


_MODEL_TYPES = {
    "llama": Family.LLAMA,
    "mistral": Family.MISTRAL,
    "qwen2": Family.QWEN2,
    "qwen3": Family.QWEN3,
}
_MAX_POSITION = {
    Family.LLAMA: 2048,
    Family.MISTRAL: 131072,
    Family.QWEN2: 32768,
    Family.QWEN3: 32768,
}
_NUM_KV_HEADS = {Family.MISTRAL: 8, Family.QWEN2: 32, Family.QWEN3: 32}
_MISTRAL_WINDOW = 4096
_QWEN3_HEAD_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Architecture numbers of one checkpoint."""

    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding; may exceed the tokens the tokenizer has."""
    rms_norm_eps: float
    rope: RopeSpec
    max_model_len: int
    """Context limit in tokens: after rope scaling, sliding window and the operator's own limit."""
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token adds to the cache, over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

    def limited(self, max_model_len: int | None) -> ModelSpec:
        """With the operator's context limit. Raises ConfigError if the model cannot reach it."""
        if max_model_len is None or max_model_len == self.max_model_len:
            return self
        if max_model_len > self.max_model_len:
            raise ConfigError(
                "model.max_model_len",
                f"{max_model_len} is more than the {self.max_model_len} tokens of this model; "
                "lower it, or leave it out to take the model's own",
            )
        return replace(self, max_model_len=max_model_len)


def read_spec(folder: Path, max_model_len: int | None = None) -> ModelSpec:
    """Read ``config.json`` and, if there, ``generation_config.json`` of a Hugging Face folder.

    Raises ModelLoadError naming the file or key; ConfigError when ``max_model_len`` is beyond the
    model.
    """
    config = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    try:
        return parse_spec(config, generation).limited(max_model_len)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder / 'config.json'}: {error}") from None


def parse_spec(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """Make a ModelSpec from the plain values of ``config.json``. Raises ModelLoadError naming the
    key.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        # The outer architecture is what the file was saved for; the inner part knows the rest.
        outer = config.get("architectures")
        config = {**config, **nested} | ({"architectures": outer} if outer else {})
    family = _family(config)
    if config.get("quantization_config"):
        raise ModelLoadError(
            "quantization_config: quantised checkpoints are not supported; use a GGUF file instead"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"hidden_act: {activation!r} is not supported; only silu is")
    hidden_size, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    num_kv_heads = _num_kv_heads(config, family, num_heads)
    head_dim = _head_dim(config, family, hidden_size, num_heads)
    rope = parse_rope(
        config, _count(config, "max_position_embeddings", _MAX_POSITION[family]), head_dim
    )
    window = _sliding_window(config, family)
    attention_bias = family in (Family.LLAMA, Family.QWEN3) and bool(
        config.get("attention_bias", False)
    )
    bos = config.get("bos_token_id")
    return ModelSpec(
        family=family,
        num_layers=_count(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_count(config, "vocab_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        max_model_len=_context_limit(rope, window),
        sliding_window=window,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family is Family.QWEN2 or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family is Family.LLAMA and bool(config.get("mlp_bias", False)),
        qk_norm=family is Family.QWEN3,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=_eos_token_ids(config, generation or {}),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return values


def _family(config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or []
    for name in names:
        if name in set(Family):
            return Family(name)
    if not names and config.get("model_type") in _MODEL_TYPES:
        return _MODEL_TYPES[config["model_type"]]
    found = ", ".join(map(str, names)) or config.get("model_type") or "none named"
    raise ModelLoadError(
        f"architecture {found} is not supported; supported are {', '.join(Family)}"
    )


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{key}: must be a whole number of at least 1, not {value!r}")
    return value


def _num_kv_heads(config: Mapping[str, Any], family: Family, num_heads: int) -> int:
    key = "num_key_value_heads"
    if config.get(key, 0) is None:
        return num_heads
    num_kv_heads = _count(config, key, _NUM_KV_HEADS.get(family, num_heads))
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    return num_kv_heads


def _head_dim(config: Mapping[str, Any], family: Family, hidden_size: int, num_heads: int) -> int:
    default = _QWEN3_HEAD_DIM if family is Family.QWEN3 else hidden_size // num_heads
    explicit = family is Family.QWEN3 or config.get("head_dim") is not None
    if not explicit and hidden_size % num_heads:
        raise ModelLoadError(
            f"hidden_size: {hidden_size} is not a multiple of num_attention_heads {num_heads}"
        )
    head_dim = _count(config, "head_dim", default) if explicit else default
    if head_dim % 2:
        raise ModelLoadError(f"head_dim: {head_dim} is odd; rotary embedding needs an even one")
    return head_dim


def _sliding_window(config: Mapping[str, Any], family: Family) -> int | None:
    if family is Family.LLAMA:
        return None
    if family is Family.MISTRAL:
        window = config.get("sliding_window", _MISTRAL_WINDOW)
    else:
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return None if window is None else _count({"sliding_window": window}, "sliding_window")


def _context_limit(rope: RopeSpec, window: int | None) -> int:
    """A sliding window is exact up to its own length, so longer contexts are refused rather than
    computed wrongly.
    """
    if window is None or window >= rope.context_limit:
        return rope.context_limit
    log.warning(
        "context limit lowered from %d to %d tokens: the model's sliding window; "
        "attention that slides over longer contexts is not supported",
        rope.context_limit,
        window,
    )
    return window


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """All ids that end a sequence, of both files, in order and once each."""
    ids: dict[int, None] = {}
    for source in (generation, config):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                ids[token] = None
    return tuple(ids)
