"""Tiny random models as the system serves them: a folder on disk, and what it must answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reference_loop import (
    AllLogits,
    Answer,
    decoder_logits,
    next_logits,
    reference_answer,
    transformers_logits,
)
from tiny_models import VOCAB_SIZE, save, tiny_model

from kvferry.core.config import DecodeConfig, ModelConfig
from kvferry.core.sampling import SamplingParams
from kvferry.engine.backend import Backend
from kvferry.engine.loading import load_backend
from kvferry.kv_transfer.layout import head_nbytes
from kvferry.models.load import load_model
from kvferry.models.spec import read_spec

EOS = 2
MAX_MODEL_LEN = 128


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One float64 model, three ways: its files, the reference's logits, and ours without a
    cache.
    """

    folder: Path
    transformers: AllLogits
    dense: AllLogits

    def backends(
        self,
        num_tokens: int = 2048,
        *,
        dtype: str = "float64",
        kv_dtype: str | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        swap_tokens: int = 0,
    ) -> Callable[[int], Backend]:
        """``local_system``'s way to ask for a backend."""
        return partial(
            served_backend,
            self.folder,
            num_tokens=num_tokens,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_model_len=max_model_len,
            swap_tokens=swap_tokens,
        )

    def answer(
        self,
        prompt: Sequence[int],
        likely: Sequence[int] = (),
        *,
        sample_index: int = 0,
        **sampling: Any,
    ) -> Answer:
        """What the request must answer; the reference and our own model must agree on it.

        ``likely``: a guess of the tokens, which makes this faster where it is right.
        """
        params = sampling_params(**sampling)
        ours, theirs = (
            reference_answer(
                next_logits(model, [*prompt, *likely]),
                prompt,
                params,
                eos=(EOS,),
                sample_index=sample_index,
            )
            for model in (self.dense, self.transformers)
        )
        assert ours.token_ids == theirs.token_ids
        return theirs


def served_backend(
    folder: Path,
    block_size: int,
    *,
    num_tokens: int = 2048,
    dtype: str = "float64",
    kv_dtype: str | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    swap_tokens: int = 0,
) -> Backend:
    """Load a tiny model's folder as a worker does when it starts, with room for ``num_tokens`` in
    its cache and for ``swap_tokens`` in host memory.
    """
    model = ModelConfig(dtype=dtype, kv_dtype=kv_dtype, max_model_len=max_model_len)  # type: ignore[arg-type]
    spec = read_spec(folder)
    per_token = 2 * spec.num_layers * spec.num_kv_heads
    per_token *= head_nbytes(spec.head_dim, kv_dtype or dtype)
    pool = DecodeConfig(
        block_size=block_size,
        kv_memory=num_tokens * per_token,
        swap_memory=swap_tokens * per_token,
    )
    return load_backend(folder, VOCAB_SIZE, model, pool, "pool")


def make_tiny(folder: Path, family: str, seed: int = 0) -> TinyModel:
    torch.set_num_threads(1)
    model = tiny_model(family, torch.float64, seed, max_position_embeddings=256)
    save(model, folder)
    decoder = load_model(folder, torch.float64)
    return TinyModel(folder, transformers_logits(model), decoder_logits(decoder))


def sampling_params(**sampling: Any) -> SamplingParams:
    """With the same defaults as ``LocalSystem.stream``."""
    values = {"temperature": 0.0, "seed": 0, "max_tokens": 8} | sampling
    return SamplingParams(**values)
