"""Launches of edits, of the counts behind them, and of log-probabilities."""

from __future__ import annotations

import torch

from kvferry.kernels.launch import Launch, next_power_of_2, require
from kvferry.kernels.sampling.edit_kernel import add_tokens_kernel, edit_kernel, scatter_kernel
from kvferry.kernels.sampling.launches import Split, check, check_logits, floats, split_launch
from kvferry.kernels.sampling.logprob_kernel import merge_top_kernel, top_of_split_kernel
from kvferry.kernels.sampling.tensors import (
    MAX_TOP_LOGPROBS,
    EditTensors,
    Penalties,
    RaggedIds,
    TopLogprobs,
)

IDS_AT_ONCE = 256


def add_tokens_launch(
    counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, is_prompt: bool
) -> Launch:
    """``counts`` int32 [num_slots, V]; ``slots``, ``token_ids`` int32 [N]."""
    fits = counts.dim() == 2 and counts.dtype == torch.int32 and counts.is_contiguous()
    require(fits, "counts", "must be int32 [num_slots, V], contiguous")
    count = len(token_ids)
    check(slots, "slots", torch.int32, count)
    check(token_ids, "token_ids", torch.int32, count)
    return Launch(
        kernel=add_tokens_kernel,
        grid=(-(-count // IDS_AT_ONCE),),
        args={
            "p_counts": counts,
            "p_slot": slots,
            "p_token": token_ids,
            "num_tokens": count,
            "num_slots": counts.shape[0],
            "vocab_size": counts.shape[1],
        },
        constants={"PROMPT": is_prompt, "BLOCK": IDS_AT_ONCE},
    )


def edit_launches(
    logits: torch.Tensor, edits: EditTensors, out: torch.Tensor, vocab_size: int
) -> list[Launch]:
    """``logits`` [R, >= V] -> ``out`` float32 [R, V]. Raises ValueError naming what is wrong."""
    check_logits(logits, vocab_size)
    rows = len(logits)
    check(out, "out", torch.float32, rows, vocab_size)
    num_words = -(-vocab_size // 32)
    if edits.allowed_bits is not None:
        check(edits.allowed_bits, "allowed_bits", torch.int32, rows, num_words)
    if edits.penalties is not None:
        _check_penalties(edits.penalties, rows, vocab_size)
    penalties = edits.penalties
    split = Split.of(vocab_size)
    args = {
        "p_logits": logits,
        "p_counts": penalties and penalties.counts,
        "p_slot": penalties and penalties.slot,
        "p_repetition": penalties and penalties.repetition,
        "p_frequency": penalties and penalties.frequency,
        "p_presence": penalties and penalties.presence,
        "p_bits": edits.allowed_bits,
        "p_out": out,
        "stride": logits.stride(0),
        "vocab_size": vocab_size,
        "num_words": num_words,
    }
    constants = {
        "PENALTIES": penalties is not None,
        "BITS": edits.allowed_bits is not None,
        "BLOCK": split.block,
    }
    # Biases before bans, in a launch of their own: an id may be in both.
    return [
        split_launch(edit_kernel, rows, split, args, constants),
        *(_scatter(edits.bias, out, "bias", is_sum=True) if edits.bias else ()),
        *(_scatter(edits.banned, out, "banned", is_sum=False) if edits.banned else ()),
    ]


def _check_penalties(penalties: Penalties, rows: int, vocab_size: int) -> None:
    check(penalties.counts, "counts", torch.int32, len(penalties.counts), vocab_size)
    check(penalties.slot, "slot", torch.int32, rows)
    check(penalties.repetition, "repetition", torch.float32, rows)
    check(penalties.frequency, "frequency", torch.float32, rows)
    check(penalties.presence, "presence", torch.float32, rows)


def _scatter(ragged: RaggedIds, out: torch.Tensor, name: str, is_sum: bool) -> list[Launch]:
    rows, count = len(out), len(ragged.ids)
    check(ragged.ids, f"{name}.ids", torch.int32, count)
    check(ragged.offsets, f"{name}.offsets", torch.int32, rows + 1)
    if is_sum:
        require(ragged.values is not None, f"{name}.values", "must be given")
    if ragged.values is not None:
        check(ragged.values, f"{name}.values", torch.float32, count)
    args = {
        "p_out": out,
        "p_ids": ragged.ids,
        "p_values": ragged.values if is_sum else None,
        "p_offsets": ragged.offsets,
        "vocab_size": out.shape[1],
    }
    constants = {"ADD": is_sum, "BLOCK": IDS_AT_ONCE}
    return [Launch(kernel=scatter_kernel, grid=(rows,), args=args, constants=constants)]


def top_logprobs_launches(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    out: TopLogprobs,
    vocab_size: int,
) -> list[Launch]:
    """``out.ids`` says how many are wanted. Raises ValueError naming what does not fit."""
    check_logits(logits, vocab_size)
    queries, count = len(rows), out.ids.shape[1]
    most = min(MAX_TOP_LOGPROBS, vocab_size)
    require(0 <= count <= most, "count", f"is {count}; 0 to {most} are possible")
    check(rows, "rows", torch.int32, queries)
    check(token_ids, "token_ids", torch.int64, queries)
    check(out.chosen, "chosen", torch.float32, queries)
    check(out.ids, "ids", torch.int32, queries, count)
    check(out.values, "values", torch.float32, queries, count)
    device, split = logits.device, Split.of(vocab_size)
    shared = {
        "p_logits": logits,
        "p_rows": rows,
        "p_top": floats(device, queries, split.count),
        "p_mass": floats(device, queries, split.count),
        "p_best": floats(device, queries, split.count, count),
        "p_best_id": torch.empty(queries, split.count, count, dtype=torch.int32, device=device),
        "stride": logits.stride(0),
        "vocab_size": vocab_size,
        "num_splits": split.count,
        "count": count,
    }
    outputs = {"p_chosen": out.chosen, "p_ids": out.ids, "p_values": out.values}
    return [
        split_launch(top_of_split_kernel, queries, split, shared, {"BLOCK": split.block}),
        Launch(
            kernel=merge_top_kernel,
            grid=(queries,),
            args=shared | outputs | {"p_token": token_ids},
            constants={"SPLITS": split.padded, "COUNT": next_power_of_2(MAX_TOP_LOGPROBS)},
        ),
    ]
