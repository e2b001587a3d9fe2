"""Runs steps on a model: plan -> tensors -> hidden states -> logits of sampled rows -> tokens."""

from __future__ import annotations

import numpy as np
import torch

from kvferry.cache.paged import PagedKV
from kvferry.engine.attention import PagedAttention
from kvferry.engine.plan import StepPlan, StepResult
from kvferry.engine.sampler import sample
from kvferry.engine.step_tensors import StepTensors
from kvferry.models.decoder import Decoder


class ModelRunner:
    """A decoder on a paged cache. ``vocab_size`` is the tokenizer's: no id past it is sampled."""

    def __init__(
        self, decoder: Decoder, kv: PagedKV, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._vocab_size = vocab_size
        self._device = torch.device(device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step and wait for its tokens. The KV of all rows is written, whatever their
        logits.
        """
        tensors = StepTensors.build(plan, self._kv.block_size, self._device)
        attend = PagedAttention(self._kv, tensors)
        hidden = self._decoder(tensors.token_ids, tensors.positions, attend)
        if not len(plan.sampled):
            return StepResult(token_ids=np.zeros(0, dtype=np.int64))
        logits = self._decoder.logits(hidden[tensors.sampled_tokens])
        return sample(logits, plan.sampling, self._vocab_size)
