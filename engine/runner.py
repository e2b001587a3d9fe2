"""Runs steps on a model: plan -> tensors -> hidden states -> logits of sampled rows -> tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvferry.cache.paged import PagedKV
from kvferry.engine.attention import PagedAttention
from kvferry.engine.block_moves import move_blocks
from kvferry.engine.cpu_attention import compiled_attention
from kvferry.engine.graphs import Capture, DecodeGraphs, Progress, StaticInputs, buckets_for
from kvferry.engine.in_flight import InFlight, Settled
from kvferry.engine.kernel_attention import KernelAttention
from kvferry.engine.kernel_sampler import KernelSampler
from kvferry.engine.plan import LayerDone, SamplingRows, StepPlan, StepResult
from kvferry.engine.quantised_attention import QuantisedAttention
from kvferry.engine.sampler import sample
from kvferry.engine.step_tensors import StepArrays, StepTensors
from kvferry.kernels.ops import Backend
from kvferry.models.decoder import Attend, Decoder, Telling


class ModelRunner:
    """A decoder on a paged cache of the same device. ``vocab_size`` is the tokenizer's: no id past
    it is sampled.
    """

    def __init__(
        self, decoder: Decoder, kv: PagedKV, vocab_size: int, *, samples: bool = True
    ) -> None:
        """``samples``: false on ranks that get no logits."""
        self._samples = samples
        self._decoder = decoder
        self._kv = kv
        self._block_size = kv.block_size
        self._vocab_size = vocab_size
        self._device = kv.tensor.device
        self._attention = attention_for(decoder, kv)
        self._graphs: DecodeGraphs | None = None
        self._prepared: tuple[StepPlan, StepArrays] | None = None
        is_triton = decoder.backend.is_triton
        self._draw = KernelSampler(decoder.ops).draw if is_triton else _drawn_at_once

    def execute(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        """Run one step and wait for its tokens. The KV of all rows is written, whatever their
        logits.
        """
        return self.launch(plan, layer_done).wait()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, layer_done: LayerDone | None = None) -> InFlight:
        """The same, behind the host where the device is not the host. A step without sampled rows
        has nothing to wait for, and may still run when it counts as done.
        """
        move_blocks(self._kv, plan)
        if not len(plan.query_lens):
            return Settled(StepResult(token_ids=np.zeros(0, dtype=np.int64)))
        logits = self.logits(plan, layer_done)
        if not (len(plan.sampled) and self._samples):
            return Settled(StepResult(token_ids=np.zeros(0, dtype=np.int64)))
        return self._draw(logits, plan.sampling, self._vocab_size)

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> None:
        """Get a step ready behind the one in flight; its token ids may still change in place."""
        arrays = StepArrays.of(plan, self._block_size)
        assert arrays.token_ids is plan.token_ids, "only steps of decodes are prepared"
        self._prepared = plan, arrays
        if self._graphs is not None:
            self._graphs.prepare(arrays)

    def _arrays_of(self, plan: StepPlan) -> StepArrays:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is plan:
            return prepared[1]
        return StepArrays.of(plan, self._block_size)

    def logits(self, plan: StepPlan, layer_done: LayerDone | None = None) -> torch.Tensor:
        """Run one step: [num_sampled, V] in the compute dtype, on the device."""
        arrays = self._arrays_of(plan)
        if self._graphs is not None and layer_done is None:
            logits = self._graphs.logits(arrays)
            if logits is not None:
                return logits
        tensors = arrays.on(self._device)
        attend = self._attention(tensors)
        if layer_done is not None:
            layer_done(0, self._event())
            attend = Telling(attend, lambda layer: layer_done(layer + 1, self._event()))
        hidden = self._decoder(tensors.token_ids, tensors.positions, attend)
        return self._decoder.logits(hidden.index_select(0, tensors.sampled_tokens))

    @torch.inference_mode()
    def capture_graphs(
        self, capture: Capture, progress: Progress, max_seqs: int, max_query_len: int = 1
    ) -> None:
        """From now on steps of up to ``max_seqs`` sequences of up to ``max_query_len`` tokens each
        are replayed, except where somebody listens to their layers.
        """
        attention = self._attention
        assert isinstance(attention, KernelAttention), "graphs are of kernels"

        def run(inputs: StaticInputs, query_len: int) -> torch.Tensor:
            attend = attention.decoding(inputs.attention, query_len)
            hidden = self._decoder(inputs.token_ids, inputs.positions, attend)
            return self._decoder.logits(hidden[inputs.sampled_tokens])

        max_blocks = -(-self._decoder.spec.max_model_len // self._block_size)
        buckets = buckets_for(max_seqs, max_query_len)
        self._graphs = DecodeGraphs(run, buckets, max_blocks, self._device)
        self._graphs.capture_all(capture, progress)

    def _event(self) -> torch.cuda.Event | None:
        """What the compute stream has been told to do so far; None where nothing runs behind."""
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event


def _drawn_at_once(logits: torch.Tensor, rows: SamplingRows, vocab_size: int) -> InFlight:
    return Settled(sample(logits, rows, vocab_size))


def attention_for(decoder: Decoder, kv: PagedKV) -> Callable[[StepTensors], Attend]:
    """What makes the decoder's callback for a step, by the backend of its ops."""
    if decoder.backend is Backend.CPU:
        compiled = compiled_attention(kv, decoder.spec.num_heads, decoder.dtype)
        if compiled is not None:
            return compiled
    if not decoder.backend.is_triton:
        return partial(PagedAttention if kv.scales is None else QuantisedAttention, kv)
    spec = decoder.spec
    return KernelAttention(
        kv,
        decoder.ops,
        spec.num_heads,
        spec.max_model_len,
        decoder.dtype,
        batch_invariant=decoder.backend is Backend.TRITON_BATCH_INVARIANT,
    )
