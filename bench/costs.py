"""Floating-point operations and bytes that tokens cost, from a model's numbers alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.models.spec import ModelSpec

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Costs:
    """What a computation has to do at least."""

    flops: int
    nbytes: int
    """Read from memory: every weight once per step, and the KV of every context."""


def layer_weights(spec: ModelSpec) -> int:
    """Elements of the matrices of all layers; norms and biases are too small to count."""
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + spec.num_kv_heads)
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    return spec.num_layers * (attention + mlp)


def head_weights(spec: ModelSpec) -> int:
    """Elements of the matrix that turns hidden states into logits."""
    return spec.hidden_size * spec.vocab_size


def attention_flops(spec: ModelSpec, keys: int) -> int:
    """One query position over ``keys`` positions, in all layers: scores and their sum of values."""
    return 4 * spec.num_layers * spec.num_heads * spec.head_dim * keys


def prefill_costs(spec: ModelSpec, num_tokens: int) -> Costs:
    """A whole prompt in one step, of which the last position gets logits."""
    linear = 2 * (num_tokens * layer_weights(spec) + head_weights(spec))
    keys = num_tokens * (num_tokens + 1) // 2
    weights = layer_weights(spec) + head_weights(spec)
    return Costs(linear + attention_flops(spec, keys), weights * FLOAT32_BYTES)


def decode_costs(spec: ModelSpec, batch: int, contexts: Iterable[int]) -> Costs:
    """One step per entry of ``contexts``, the length of each of ``batch`` sequences before it."""
    weights = layer_weights(spec) + head_weights(spec)
    flops = nbytes = 0
    for context in contexts:
        flops += batch * (2 * weights + attention_flops(spec, context + 1))
        nbytes += weights + batch * context * spec.kv_elements_per_token
    return Costs(flops, nbytes * FLOAT32_BYTES)
