"""``transformers`` as a peer: the same folder, dtype and threads, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from kvferry.bench.throughput import Timing


class TransformersEngine:
    """Greedy ``generate`` of whole batches. Its first token is timed by a run of its own."""

    def __init__(self, folder: Path) -> None:
        self.name = f"transformers {transformers.__version__}"
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # Sequences end by length alone.
        self._model.generation_config.eos_token_id = None

    def timing(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
        first_s = self._generate(prompts, 1)
        if num_tokens == 1:
            return Timing(first_s, 0.0)
        return Timing(first_s, self._generate(prompts, num_tokens) - first_s)

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        token_ids = torch.tensor(prompts)
        started = time.perf_counter()
        out = self._model.generate(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - started
        assert out.shape[1] == token_ids.shape[1] + num_tokens, out.shape
        return seconds
