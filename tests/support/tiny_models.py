"""Tiny random models of every family, written by ``transformers``: the reference for ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvferry.models.decoder import Heads

FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 24, "sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
}

VOCAB_SIZE = 96
MAX_POSITION = 32
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(family: str, dtype: torch.dtype, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A random model of ``family``; every parameter differs from its usual start, biases and
    norms too.
    """
    make_config, make_model, own = FAMILIES[family]
    model = make_model._from_config(
        make_config(**{**_SIZES, **own, **config}), attn_implementation="sdpa"
    )
    generator = torch.Generator().manual_seed(seed)
    # Parameters only: a rotary table in half precision would be another model.
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
        parameter.data = (1 + noise if "norm" in name else noise).to(dtype)
    model.tie_weights()
    return model.eval()


def reference_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """token_ids [T] -> logits [T, vocabulary]."""
    with torch.inference_mode():
        return model(token_ids[None]).logits[0]


def our_logits(decoder: torch.nn.Module, token_ids: Tensor) -> Tensor:
    """token_ids [T] -> logits [T, vocabulary], all at once with dense causal attention."""
    with torch.inference_mode():
        hidden = decoder(token_ids, torch.arange(len(token_ids)), dense_attend)
        return decoder.logits(hidden)


def dense_attend(layer: int, heads: Heads) -> Tensor:
    """Causal attention of one whole sequence -> [T, Hq, D]."""
    heads_first = (x.transpose(0, 1)[None] for x in (*heads.rotated(), heads.v))
    out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def some_tokens(count: int, seed: int = 7) -> Tensor:
    """[count] int64 ids of the tiny vocabulary."""
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed))


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Write weights and configuration as ``save_pretrained`` does."""
    model.save_pretrained(folder, **options)
    return folder
