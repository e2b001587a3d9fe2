"""Sampling of a decode step, from the logits to the tokens, and verification of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from kvferry.bench.kernel_cases.case import Case, Limit, Work
from kvferry.kernels.chips import Chip
from kvferry.kernels.launch import Launch
from kvferry.kernels.sampling import reference
from kvferry.kernels.sampling.edit_launches import edit_launches, top_logprobs_launches
from kvferry.kernels.sampling.launches import sample_launches
from kvferry.kernels.sampling.tensors import (
    DraftTensors,
    EditTensors,
    Penalties,
    RaggedIds,
    SampledTokens,
    SamplingTensors,
    TopLogprobs,
    VerifiedTokens,
)
from kvferry.kernels.sampling.verify_launches import coupled_launches, rejection_launches

# Batch and vocabulary of Llama-3 and Qwen3.
SIZES = ((64, 128256), (256, 151936))
NUM_DRAFTS = 3
TOP = 20
NUM_BIASES = 300
IN_CI = ("coupled", "rejection", "edits", f"top {TOP}")
"""Together they launch every kernel but the one that counts tokens."""

Make = Callable[[int, int, torch.device, Chip], Work]


def cases() -> Iterator[Case]:
    """The floor is one pass over bf16 logits; no share of it is asked for."""
    for rows, vocab_size in SIZES:
        for name, make in (
            ("greedy", partial(_sample, {"temperature": 0.0}, False)),
            ("no filter", partial(_sample, {}, False)),
            ("top-p", partial(_sample, {"top_p": 0.9}, True)),
            ("top-k and top-p", partial(_sample, {"top_k": 50, "top_p": 0.9}, True)),
            ("coupled", partial(_verify, coupled_launches, reference.verify_coupled, False)),
            ("rejection", partial(_verify, rejection_launches, reference.verify_rejection, True)),
        ):
            nbytes = rows * vocab_size * 2
            if name == "rejection":
                # One race per sequence reads its drafts' probabilities in one row.
                nbytes += rows // (NUM_DRAFTS + 1) * vocab_size * 4
            yield _case(name, rows, vocab_size, make, nbytes)
    rows, vocab_size = SIZES[0]
    # Counts and bits are read, and float32 is written, beside the logits.
    edits_nbytes = rows * vocab_size * (2 + 4 + 4) + rows * vocab_size // 8
    yield _case("edits", rows, vocab_size, _edits, edits_nbytes, tolerance=1e-6)
    yield _case(f"top {TOP}", rows, vocab_size, _logprobs, rows * vocab_size * 2, tolerance=1e-6)


def _case(
    name: str, rows: int, vocab_size: int, make: Make, nbytes: int, tolerance: float = 0.0
) -> Case:
    return Case(
        kernel="sampling",
        name=f"{name}, {rows} x {vocab_size} bf16",
        make=partial(make, rows, vocab_size),
        nbytes=nbytes,
        flops=0,
        tolerance=tolerance,
        limit=Limit.COPY,
        in_ci=rows == SIZES[0][0] and name in IN_CI,
    )


def _logits(rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """As peaked as a language model's: a few ids hold most of the mass."""
    logits = torch.randn(rows, vocab_size, device=device, dtype=torch.float32) * 2.5
    return logits.to(torch.bfloat16)


def _params(
    rows: int, device: torch.device, chosen: Mapping[str, float], filtered: bool
) -> SamplingTensors:
    def full(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), chosen.get(name, default), dtype=dtype, device=device)

    position = torch.randint(0, 8192, (rows,), device=device)
    return SamplingTensors(
        temperature=full("temperature", 0.8, torch.float32),
        top_k=full("top_k", 0, torch.int32),
        top_p=full("top_p", 1.0, torch.float32),
        min_p=full("min_p", 0.0, torch.float32),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), device=device),
        sample_index=full("sample_index", 0, torch.int32),
        position=position,
        filtered=filtered,
    )


def _sample(
    chosen: Mapping[str, float],
    filtered: bool,
    rows: int,
    vocab_size: int,
    device: torch.device,
    chip: Chip,
) -> Work:
    logits, params = _logits(rows, vocab_size, device), _params(rows, device, chosen, filtered)
    out = SampledTokens.empty(rows, device)
    peers: dict[str, Callable[[], object]] = {}
    if "temperature" in chosen:
        peers["torch argmax"] = lambda: logits.argmax(dim=-1)
    elif "top_p" in chosen:
        peers["torch sort"] = lambda: _sorted_draw(logits, params)
    return Work(
        launches=sample_launches(logits, params, out, vocab_size, edited=False),
        outputs=[out.token_ids],
        expected=lambda: [reference.sample(logits, params, vocab_size).token_ids],
        peers=peers,
    )


def _sorted_draw(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Top-p as it is written where speed does not matter, with noise of any kind."""
    falling, ids = (logits.float() / params.temperature.unsqueeze(1)).sort(dim=-1, descending=True)
    mass = falling.softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass
    kept = mass.masked_fill(before >= params.top_p.unsqueeze(1), 0.0)
    # An exponential race: what multinomial does, less its checks of the values.
    race = kept / torch.empty_like(kept).exponential_()
    return ids.gather(1, race.argmax(dim=-1, keepdim=True))


def _drafts(
    logits: torch.Tensor, vocab_size: int, *, with_probs: bool
) -> tuple[DraftTensors, VerifiedTokens]:
    """Of a sequence per NUM_DRAFTS + 1 rows, from a model that agrees with the target in part."""
    rows, device = len(logits), logits.device
    sequences = rows // (NUM_DRAFTS + 1)
    offsets = torch.arange(sequences + 1, dtype=torch.int32, device=device) * (NUM_DRAFTS + 1)
    guesses = logits.float() + torch.randn(rows, vocab_size, device=device)
    drafts = DraftTensors(
        offsets=offsets,
        token_ids=guesses.argmax(dim=-1),
        probs=guesses.softmax(dim=-1) if with_probs else None,
    )
    return drafts, VerifiedTokens.empty(sequences, device)


def _verify(
    launches_of: Callable[..., list[Launch]],
    op: Callable[..., VerifiedTokens],
    with_probs: bool,
    rows: int,
    vocab_size: int,
    device: torch.device,
    chip: Chip,
) -> Work:
    logits, params = _logits(rows, vocab_size, device), _params(rows, device, {"top_p": 0.9}, True)
    drafts, out = _drafts(logits, vocab_size, with_probs=with_probs)

    def expected() -> list[torch.Tensor]:
        found = op(logits, params, drafts, vocab_size)
        return [found.num_accepted, found.token_ids]

    return Work(
        launches=launches_of(logits, params, drafts, out, vocab_size, edited=False),
        outputs=[out.num_accepted, out.token_ids],
        expected=expected,
    )


def _edits(rows: int, vocab_size: int, device: torch.device, chip: Chip) -> Work:
    logits = _logits(rows, vocab_size, device)
    ones = torch.ones(rows, dtype=torch.float32, device=device)
    words = -(-vocab_size // 32)
    edits = EditTensors(
        penalties=Penalties(
            counts=torch.randint(0, 3, (rows, vocab_size), dtype=torch.int32, device=device),
            slot=torch.arange(rows, dtype=torch.int32, device=device),
            repetition=ones * 1.1,
            frequency=ones * 0.2,
            presence=ones * 0.3,
        ),
        bias=RaggedIds(
            ids=torch.arange(rows * NUM_BIASES, dtype=torch.int32, device=device) % vocab_size,
            offsets=torch.arange(rows + 1, dtype=torch.int32, device=device) * NUM_BIASES,
            values=torch.randn(rows * NUM_BIASES, device=device),
        ),
        # Everything is allowed: infinite outputs have no relative error.
        allowed_bits=torch.full((rows, words), -1, dtype=torch.int32, device=device),
    )
    out = torch.empty(rows, vocab_size, dtype=torch.float32, device=device)
    return Work(
        launches=edit_launches(logits, edits, out, vocab_size),
        outputs=[out],
        expected=lambda: [reference.apply_edits(logits, edits, vocab_size)],
    )


def _logprobs(rows: int, vocab_size: int, device: torch.device, chip: Chip) -> Work:
    logits = _logits(rows, vocab_size, device)
    queries = torch.arange(rows, dtype=torch.int32, device=device)
    token_ids = torch.randint(0, vocab_size, (rows,), device=device)
    out = TopLogprobs.empty(rows, TOP, device)

    def expected() -> list[torch.Tensor]:
        found = reference.top_logprobs(logits, queries, token_ids, TOP, vocab_size)
        return [found.chosen, found.ids, found.values]

    return Work(
        launches=top_logprobs_launches(logits, queries, token_ids, out, vocab_size),
        outputs=[out.chosen, out.ids, out.values],
        expected=expected,
        peers={"torch topk": lambda: logits.float().log_softmax(dim=-1).topk(TOP, dim=-1)},
    )
