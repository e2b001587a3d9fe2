"""The one dense decoder: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3.

Pure: no cache, no parallelism, no masks. Attention is a callback, so that the same weights serve
paged, chunked and dense runs. Parameters carry their Hugging Face names.

Shapes: T tokens of a ragged batch, C hidden size, Hq query heads, Hkv key/value heads, D head
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvferry.models.rope import RotaryEmbedding, rotate
from kvferry.models.spec import ModelSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]. Softmax scale is D ** -0.5."""
Rotation = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps), the mean in float32 whatever the compute dtype, as
    in the reference.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.to(torch.float32)
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention around the engine's callback."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, q_size, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv_size, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv_size, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(q_size, spec.hidden_size, bias=spec.output_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """x [T, C] -> [T, C]."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        return self.o_proj(attend(self.layer, q, k, v).flatten(-2))


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, C] -> [T, C]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer with pre-norm residuals."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec, layer)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = Mlp(spec)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """x [T, C] -> [T, C]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, layers and the last norm: what checkpoints call ``model``."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        # Given its weight, an embedding skips the random start that it would run even on meta.
        self.embed_tokens = nn.Embedding.from_pretrained(
            torch.empty(spec.vocab_size, spec.hidden_size)
        )
        self.layers = nn.ModuleList(Layer(spec, i) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)


class Decoder(nn.Module):
    """The whole model, built on the meta device: a loader assigns all its weights."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.rotary = RotaryEmbedding(spec.rope, spec.head_dim, spec.max_model_len)
        with torch.device("meta"):
            self.model = Trunk(spec)
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids [T] int64, positions [T] int64 -> hidden [T, C], after the last norm."""
        x = self.model.embed_tokens(token_ids)
        rotation = self.rotary(positions, x.dtype)
        for layer in self.model.layers:
            x = layer(x, rotation, attend)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, C] -> logits [R, V] in the compute dtype."""
        return self.lm_head(hidden)
