"""A model on one backend against the same weights in plain torch on the CPU, step by step.

Used by `make gpu` on a device and by the tests in Triton's interpreter. The steps are an engine's:
prompts in chunks beside decodes, drafts of several tokens, block tables in random order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvferry.bench.report import Better, Claim, Scalar
from kvferry.cache.paged import PagedKV
from kvferry.engine.plan import SamplingRows, StepPlan
from kvferry.engine.runner import ModelRunner
from kvferry.kernels.kv_layer import dequantised, quantised
from kvferry.kernels.ops import Backend
from kvferry.models.decoder import Decoder, Heads
from kvferry.models.spec import ModelSpec, parse_spec

STEPS = (
    (37, 1, 16),
    (1, 20, 0),
    (4, 1, 3),
)
"""New tokens of each of three sequences, step by step; 0: not in this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is checked."""

    backend: Backend
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int = 16
    seed: int = 0


CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# Largest relative error of the logits. Float types: roundings of eight sums per layer and product.
# int8 and FP8: elements that the cache rounds the other way, as their own sums were rounded.
SETTINGS = (
    (Backend.TRITON, torch.float32, torch.float32, 16, 1e-3),
    (Backend.TRITON, torch.bfloat16, torch.bfloat16, 16, 6e-2),
    (Backend.TRITON, torch.bfloat16, torch.bfloat16, 128, 6e-2),
    (Backend.TRITON, torch.float16, torch.float16, 64, 1e-2),
    (Backend.TRITON, torch.bfloat16, torch.float8_e4m3fn, 64, 1e-1),
    (Backend.TRITON, torch.bfloat16, torch.int8, 64, 7e-2),
    (Backend.TRITON_BATCH_INVARIANT, torch.bfloat16, torch.bfloat16, 64, 6e-2),
)


def random_decoder(spec: ModelSpec, seed: int) -> Decoder:
    """Float32 weights on the CPU, of a size that keeps activations near one."""
    decoder = Decoder(spec)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in decoder.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if parameter.ndim == 1 else noise * noise.shape[1] ** -0.5
    decoder.load_state_dict(weights, assign=True)
    return decoder


def on_backend(decoder: Decoder, setting: Setting) -> Decoder:
    """The same weights, on the device and backend of a setting."""
    copy = Decoder(decoder.spec, setting.backend)
    weights = {
        name: tensor.to(setting.device, setting.dtype)
        for name, tensor in decoder.state_dict().items()
    }
    copy.load_state_dict(weights, assign=True)
    copy.rotary.to(setting.device)
    return copy


@torch.inference_mode()
def largest_error(decoder: Decoder, setting: Setting) -> float:
    """max |logits - expected| / max |expected| over the last rows of all sequences and steps.

    Expected: ``decoder`` (float32, CPU) over each whole sequence, with dense attention to the keys
    and values that a cache of the setting's type keeps.
    """
    generator = np.random.default_rng(setting.seed)
    spec = decoder.spec
    totals = np.sum(STEPS, axis=0)
    tokens = [generator.integers(spec.vocab_size, size=int(total)) for total in totals]
    expected = [
        dense_logits(decoder, torch.from_numpy(sequence), setting.kv_dtype) for sequence in tokens
    ]
    largest = max(float(logits.abs().max()) for logits in expected)
    worst = 0.0
    for logits, wanted in _run(on_backend(decoder, setting), setting, tokens, generator):
        reference = torch.stack([expected[seq][end - 1] for seq, end in wanted])
        error = float((logits.float().cpu() - reference).abs().max()) / largest
        # max() would pass over NaN.
        worst = error if not error <= worst else worst
    return worst


def _run(
    decoder: Decoder,
    setting: Setting,
    tokens: list[np.ndarray],
    generator: np.random.Generator,
) -> list[tuple[Tensor, list[tuple[int, int]]]]:
    """Per step the logits of its sequences, and for each (sequence, tokens so far)."""
    spec, size = decoder.spec, setting.block_size
    width = max(-(-len(sequence) // size) for sequence in tokens)
    blocks = generator.permutation(len(tokens) * width + 2)
    tables = blocks[: len(tokens) * width].reshape(len(tokens), width).astype(np.int32)
    kv = PagedKV.allocate(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=size,
        num_blocks=len(blocks),
        dtype=setting.kv_dtype,
        device=setting.device,
    )
    runner = ModelRunner(decoder, kv, spec.vocab_size)
    done = np.zeros(len(tokens), np.int32)
    results = []
    for number, step in enumerate(STEPS):
        seqs = np.flatnonzero(step)
        counts = np.array(step, np.int32)[seqs]
        new = [tokens[s][done[s] : done[s] + n] for s, n in zip(seqs, counts, strict=True)]
        plan = _plan(number, new, done[seqs], tables[seqs])
        done[seqs] += counts
        results.append((runner.logits(plan), [(int(s), int(done[s])) for s in seqs]))
    return results


def _plan(
    number: int, new: list[np.ndarray], context_lens: np.ndarray, tables: np.ndarray
) -> StepPlan:
    """A step whose sequences are all sampled."""
    return StepPlan(
        step=number,
        token_ids=np.concatenate(new),
        query_lens=np.array([len(part) for part in new], np.int32),
        context_lens=context_lens.copy(),
        block_tables=tables,
        sampled=np.arange(len(new), dtype=np.int32),
        sampling=SamplingRows.greedy(len(new)),
    )


def dense_logits(decoder: Decoder, tokens: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """[T, V] of a whole sequence at once. Keys and values are rounded as a ``kv_dtype`` cache does:
    how much a random model's logits make of that rounding says nothing about the kernels.
    """

    def kept(x: Tensor) -> Tensor:
        return dequantised(*quantised(x, kv_dtype))

    def attend(layer: int, heads: Heads) -> Tensor:
        q, k = heads.rotated()
        q, k, v = (part.transpose(0, 1)[None] for part in (q, kept(k), kept(heads.v)))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    hidden = decoder(tokens, torch.arange(len(tokens)), attend)
    return decoder.logits(hidden)


def check_all(device: torch.device) -> tuple[list[dict[str, Scalar]], Claim]:
    """A row per setting, and the number of those whose error is above its bound."""
    decoder = random_decoder(parse_spec(CONFIG), seed=0)
    rows: list[dict[str, Scalar]] = []
    for backend, dtype, kv_dtype, block_size, bound in SETTINGS:
        setting = Setting(
            backend=backend, device=device, dtype=dtype, kv_dtype=kv_dtype, block_size=block_size
        )
        error = largest_error(decoder, setting)
        rows.append(
            {
                "backend": backend.value,
                "compute": str(dtype).removeprefix("torch."),
                "kv": str(kv_dtype).removeprefix("torch."),
                "block": block_size,
                "error": error if math.isfinite(error) else str(error),
                "bound": bound,
                "outcome": "right" if error <= bound else "WRONG",
            }
        )
    wrong = sum(row["outcome"] != "right" for row in rows)
    claim = Claim(
        id="gpu.engine_wrong_settings", value=wrong, better=Better.LOWER, goal=0, n=len(rows)
    )
    return rows, claim
