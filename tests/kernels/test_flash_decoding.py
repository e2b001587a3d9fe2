"""flash_decoding in Triton's interpreter against the reference."""

from __future__ import annotations

import torch
from kernel_data import assert_close, random_tensors

from kvferry.kernels.chips import INTERPRETER
from kvferry.kernels.flash_decoding import reference, wrapper
from kvferry.kernels.flash_decoding.plan import SplitPlan
from kvferry.kernels.kv_layer import KvLayer

BOUNDS = {torch.float32: 1e-5}


def test_equals_the_reference() -> None:
    random = random_tensors(1)
    kv = KvLayer(random(40, 16, 2, 64), random(40, 16, 2, 64))
    tables = torch.randperm(40)[:30].view(3, 10).to(torch.int32)
    context_lens = torch.tensor([0, 70, 130], dtype=torch.int32)
    query_starts = torch.tensor([0, 1, 1, 3], dtype=torch.int32)
    q = random(4, 4, 64)
    splits = SplitPlan.for_bucket(3, 2, 4, kv, 160, INTERPRETER)
    wrapper.plan_splits(context_lens, query_starts, splits)
    args = (q, kv, tables, context_lens, query_starts, splits)
    out = wrapper.flash_decoding(*args, scale=0.125)
    assert_close(out, reference.flash_decoding(*args, scale=0.125), BOUNDS)
    assert not out[3].any()
