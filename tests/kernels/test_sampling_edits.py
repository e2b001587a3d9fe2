"""Edits of logits and top log-probabilities in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_data import ragged, random_logits

from kvferry.engine import logit_edits
from kvferry.engine.plan import LogitEdits
from kvferry.kernels.sampling import reference, wrapper
from kvferry.kernels.sampling.tensors import EditTensors, Penalties, RaggedIds

torch.set_num_threads(1)

ROWS = 5
SLOTS = 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDED = 4 * 2.0**-24
"""Relative to the largest logit: at most four operations, each rounded."""


def some(generator: torch.Generator, values: list[float]) -> torch.Tensor:
    return torch.tensor(values)[torch.randint(len(values), (ROWS,), generator=generator)]


def slots_without_repeat(generator: torch.Generator) -> torch.Tensor:
    return torch.tensor([-1, *torch.randperm(SLOTS, generator=generator).tolist()]).int()


class History:
    """Tokens of each slot, as lists and as the kernels count them."""

    def __init__(self, generator: torch.Generator, vocab_size: int) -> None:
        self.counts = torch.zeros(SLOTS, vocab_size, dtype=torch.int32)
        self.parts: dict[bool, list[list[int]]] = {}
        for is_prompt in (True, False):
            slots = torch.randint(-1, SLOTS, (300,), generator=generator).int()
            ids = torch.randint(-2, vocab_size + 2, (300,), generator=generator).int() // 3 * 3
            wrapper.add_tokens(self.counts, slots, ids, is_prompt)
            self.parts[is_prompt] = [ids[slots == slot].tolist() for slot in range(SLOTS)]


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([1, 33, 256, 600]),
    dtype=st.sampled_from(DTYPES),
)
def test_edits_are_those_of_the_engine(seed: int, vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(generator, ROWS, vocab_size + 2).clamp(-6e4, 6e4).to(dtype)
    history, slot = History(generator, vocab_size), slots_without_repeat(generator)
    penalties = Penalties(
        counts=history.counts,
        slot=slot,
        repetition=some(generator, [1.0, 0.5, 1.3]),
        frequency=some(generator, [0.0, 0.7, -2.0]),
        presence=some(generator, [0.0, 1.1, -0.4]),
    )
    bias = ragged(generator, ROWS, vocab_size, min(vocab_size, 9), values=True)
    banned = ragged(generator, ROWS, vocab_size, min(vocab_size, 9))
    edits = EditTensors(penalties=penalties, bias=bias, banned=banned)
    got = wrapper.apply_edits(logits, edits, vocab_size)
    expected = logits[:, :vocab_size].float().clone()
    logit_edits.apply_edits(
        expected, {row: engine_edit(edits, history, row) for row in range(ROWS)}
    )
    assert torch.equal(got == -torch.inf, expected == -torch.inf)
    finite = expected != -torch.inf
    error = (got - expected)[finite].abs()
    largest = logits[:, :vocab_size].abs().max() * 2 + 700
    assert bool((error <= ROUNDED * largest).all())
    ours = reference.apply_edits(logits, edits, vocab_size)
    assert bool(((ours - expected)[finite].abs() <= ROUNDED * largest).all())


def engine_edit(edits: EditTensors, history: History, row: int) -> LogitEdits:
    """What the engine's plan would hold for a row."""
    penalties, bias, banned = edits.penalties, edits.bias, edits.banned
    assert penalties is not None
    assert bias is not None
    assert banned is not None
    assert bias.values is not None
    slot = int(penalties.slot[row])
    has_slot = slot >= 0
    biased, biases = entries(bias, row, bias.values)
    return LogitEdits(
        repetition_penalty=float(penalties.repetition[row]) if has_slot else 1.0,
        frequency_penalty=float(penalties.frequency[row]) if has_slot else 0.0,
        presence_penalty=float(penalties.presence[row]) if has_slot else 0.0,
        logit_bias=dict(zip(biased, biases, strict=True)),
        banned_ids=tuple(entries(banned, row, banned.ids)[0]),
        prompt_ids=np.array(history.parts[True][slot], np.int32) if has_slot else None,
        output_ids=np.array(history.parts[False][slot], np.int32) if has_slot else None,
    )


def entries(ragged_ids: RaggedIds, row: int, values: torch.Tensor) -> tuple[list[int], list[float]]:
    part = slice(int(ragged_ids.offsets[row]), int(ragged_ids.offsets[row + 1]))
    return ragged_ids.ids[part].tolist(), values[part].tolist()


@pytest.mark.parametrize("op", [wrapper, reference])
def test_counts_grow_by_a_token_per_step(op) -> None:  # type: ignore[no-untyped-def]
    counts = torch.zeros(2, 10, dtype=torch.int32)
    prompt = torch.tensor([3, 3, 5], dtype=torch.int32)
    op.add_tokens(counts, torch.tensor([1, 1, 1], dtype=torch.int32), prompt, True)
    for token in (4, 3, 3):
        # The second row is padding.
        step = torch.tensor([token, 7], dtype=torch.int32)
        op.add_tokens(counts, torch.tensor([1, -1], dtype=torch.int32), step, False)
    in_prompt = -(2**31)
    assert counts[0].tolist() == [0] * 10
    assert counts[1].tolist() == [0, 0, 0, in_prompt + 2, 1, in_prompt, 0, 0, 0, 0]


@pytest.mark.parametrize("op", [wrapper, reference])
@pytest.mark.parametrize("vocab_size", [31, 32, 300])
def test_the_grammar_forbids_where_bits_are_zero(op, vocab_size: int) -> None:  # type: ignore[no-untyped-def]
    words = -(-vocab_size // 32)
    allowed = np.random.default_rng().random((2, vocab_size)) < 0.5
    bits = np.packbits(allowed, axis=1, bitorder="little")
    padded = np.zeros((2, words * 4), np.uint8)
    padded[:, : bits.shape[1]] = bits
    edits = EditTensors(allowed_bits=torch.from_numpy(padded.view(np.int32)))
    logits = torch.randn(2, vocab_size)
    expected = logits.masked_fill(~torch.from_numpy(allowed), -torch.inf)
    assert torch.equal(op.apply_edits(logits, edits, vocab_size), expected)


@pytest.mark.parametrize("op", [wrapper, reference])
def test_no_edit_hides_what_is_not_finite(op) -> None:  # type: ignore[no-untyped-def]
    logits = torch.zeros(3, 40)
    logits[0, 3], logits[1, 4], logits[2, 5] = torch.nan, torch.inf, -torch.inf
    ids = torch.tensor([3, 4, 5], dtype=torch.int32)
    offsets = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    edits = EditTensors(
        bias=RaggedIds(ids=ids, offsets=offsets, values=torch.ones(3)),
        banned=RaggedIds(ids=ids, offsets=offsets),
        allowed_bits=torch.zeros(3, 2, dtype=torch.int32),
    )
    edited = op.apply_edits(logits, edits, 40)
    assert edited.isnan().nonzero().tolist() == [[0, 3], [1, 4], [2, 5]]


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([1, 30, 256, 600]),
    count=st.sampled_from([0, 1, 5, 20]),
    dtype=st.sampled_from(DTYPES),
)
def test_top_logprobs(seed: int, vocab_size: int, count: int, dtype: torch.dtype) -> None:
    generator, count = torch.Generator().manual_seed(seed), min(count, vocab_size)
    logits = torch.full((6, vocab_size + 1), torch.inf, dtype=dtype)
    logits[:, :vocab_size] = random_logits(generator, 6, vocab_size).to(dtype)
    rows = torch.tensor([4, 0, 5], dtype=torch.int32)
    tokens = torch.randint(vocab_size, (3,), generator=generator)
    got = wrapper.top_logprobs(logits, rows, tokens, count, vocab_size)
    expected = reference.top_logprobs(logits, rows, tokens, count, vocab_size)
    assert torch.equal(got.ids, expected.ids)
    for ours, theirs in ((got.values, expected.values), (got.chosen, expected.chosen)):
        # Differences of logits, and one logarithm of a sum, in float32.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    "named", ["counts", "slot", "bias.values", "banned.offsets", "allowed_bits"]
)
def test_bad_edits_are_named(named: str) -> None:
    one, ids = torch.ones(2), torch.zeros(2, dtype=torch.int32)
    offsets = torch.zeros(3, dtype=torch.int32)
    edits = {
        "counts": EditTensors(
            penalties=Penalties(
                counts=torch.zeros(1, 9, dtype=torch.int32),
                slot=ids,
                repetition=one,
                frequency=one,
                presence=one,
            )
        ),
        "slot": EditTensors(
            penalties=Penalties(
                counts=torch.zeros(1, 8, dtype=torch.int32),
                slot=ids.long(),
                repetition=one,
                frequency=one,
                presence=one,
            )
        ),
        "bias.values": EditTensors(bias=RaggedIds(ids=ids, offsets=offsets)),
        "banned.offsets": EditTensors(banned=RaggedIds(ids=ids, offsets=offsets[:2])),
        "allowed_bits": EditTensors(allowed_bits=torch.zeros(2, 2, dtype=torch.int32)),
    }
    with pytest.raises(ValueError, match=named):
        wrapper.apply_edits(torch.ones(2, 8), edits[named], 8)


def test_too_many_logprobs_are_refused() -> None:
    rows, tokens = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    for count, vocab_size in ((21, 100), (6, 5)):
        with pytest.raises(ValueError, match="count"):
            wrapper.top_logprobs(torch.ones(1, vocab_size), rows, tokens, count, vocab_size)
