"""The one dense decoder: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3.

Pure: no cache, no parallelism, no masks. Attention is a callback, so that the same weights serve
paged, chunked and dense runs; everything else is an op of one column of the dispatch table.
Parameters carry their Hugging Face names.

Shapes: T tokens of a ragged batch, C hidden size, I intermediate size, Hq query heads, Hkv
key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvferry.kernels.ops import Backend, Ops, ops_for
from kvferry.kernels.rms_norm.reference import rms_norm
from kvferry.kernels.rope_kv_write.reference import rotated
from kvferry.models.rope import RotaryEmbedding
from kvferry.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """What a layer hands its attention: projections that have no position yet.

    Norm and rotation come with them rather than before, so that a kernel can do both on the way
    into the cache. ``rotated`` does them in plain torch.
    """

    q: Tensor
    """[T, Hq, D]"""
    k: Tensor
    """[T, Hkv, D]"""
    v: Tensor
    """[T, Hkv, D]"""
    cos: Tensor
    """[T, D/2] in the compute dtype."""
    sin: Tensor
    q_norm: Tensor | None = None
    """[D], weight of the RMSNorm of each query head; None in models without QK norm."""
    k_norm: Tensor | None = None
    eps: float = 0.0
    """Of both norms."""

    def rotated(self) -> tuple[Tensor, Tensor]:
        """Queries and keys at their positions: [T, Hq, D] and [T, Hkv, D]."""
        q, k = self.q, self.k
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
        return rotated(q, self.cos, self.sin), rotated(k, self.cos, self.sin)


Attend = Callable[[int, Heads], Tensor]
"""(layer, heads) -> [T, Hq, D]. Softmax scale is D ** -0.5."""
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Telling:
    """An ``Attend`` that tells of each layer whose keys and values are written."""

    attend: Attend
    tell: Callable[[int], None]

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        out = self.attend(layer, heads)
        self.tell(layer)
        return out


class Embedding(nn.Module):
    """Rows of a table."""

    def __init__(self, ops: Ops, vocab_size: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size))
        self.ops = ops

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, size]."""
        rows: Tensor = self.ops.embedding(token_ids, self.weight)
        return rows


class Linear(nn.Linear):
    """y = x W^T + b through the table's product."""

    def __init__(self, ops: Ops, size_in: int, size_out: int, bias: bool = False) -> None:
        super().__init__(size_in, size_out, bias=bias)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """x [T, size_in] -> [T, size_out]."""
        y: Tensor = self.ops.linear(x, self.weight, self.bias)
        return y


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps)."""

    def __init__(self, ops: Ops, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.ops = ops
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [T, C], residual [T, C] or None for zero -> norm of their sum, and the sum."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps), x
        normed, total = self.ops.add_rms_norm(x, residual, self.weight, self.eps)
        return normed, total


class Attention(nn.Module):
    """Grouped-query attention around the engine's callback."""

    def __init__(self, spec: ModelSpec, layer: int, ops: Ops) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Linear(ops, spec.hidden_size, q_size, bias=spec.qkv_bias)
        self.k_proj = Linear(ops, spec.hidden_size, kv_size, bias=spec.qkv_bias)
        self.v_proj = Linear(ops, spec.hidden_size, kv_size, bias=spec.qkv_bias)
        self.o_proj = Linear(ops, q_size, spec.hidden_size, bias=spec.output_bias)
        self.q_norm = RMSNorm(ops, spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(ops, spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """x [T, C] -> [T, C]."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = Heads(q, k, v, *rotation)
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
            heads = Heads(q, k, v, *rotation, *norms)
        return self.o_proj(attend(self.layer, heads).flatten(-2))


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        size, bias = spec.intermediate_size, spec.mlp_bias
        self.gate_proj = Linear(ops, spec.hidden_size, size, bias=bias)
        self.up_proj = Linear(ops, spec.hidden_size, size, bias=bias)
        self.down_proj = Linear(ops, size, spec.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, C] -> [T, C]."""
        return self.down_proj(self.ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    """One transformer layer with pre-norm residuals."""

    def __init__(self, spec: ModelSpec, layer: int, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(ops, spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec, layer, ops)
        self.post_attention_layernorm = RMSNorm(ops, spec.hidden_size, spec.rms_norm_eps)
        self.mlp = Mlp(spec, ops)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """What the layer before computed and the sum before it, [T, C] each -> the same of this
        layer. The sum is left to the next norm, which reads both anyway.
        """
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rotation, attend)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Trunk(nn.Module):
    """Embedding, layers and the last norm: what checkpoints call ``model``."""

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        super().__init__()
        self.embed_tokens = Embedding(ops, spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Layer(spec, i, ops) for i in range(spec.num_layers))
        self.norm = RMSNorm(ops, spec.hidden_size, spec.rms_norm_eps)


class Decoder(nn.Module):
    """The whole model, built on the meta device: a loader assigns all its weights."""

    def __init__(self, spec: ModelSpec, backend: Backend = Backend.TORCH) -> None:
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.ops = ops_for(backend)
        self.rotary = RotaryEmbedding(spec.rope, spec.head_dim, spec.max_model_len)
        with torch.device("meta"):
            self.model = Trunk(spec, self.ops)
            self.lm_head = Linear(self.ops, spec.hidden_size, spec.vocab_size)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids [T] int64, positions [T] int64 -> hidden [T, C], after the last norm."""
        x, residual = self.model.embed_tokens(token_ids), None
        rotation = self.rotary(positions, x.dtype)
        for layer in self.model.layers:
            x, residual = layer(x, residual, rotation, attend)
        normed: Tensor = self.model.norm(x, residual)[0]
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, C] -> logits [R, V] in the compute dtype."""
        return self.lm_head(hidden)
