"""Runners without a model, for tests and benches.

``FakeRunner`` keeps the contract of the paged cache honest: the KV it writes spells out (token,
position, layer, head), before each step it checks that the whole context in the cache spells what
it must, and the token it yields is a hash of all the tokens read back from there. A block that is
missing, stale, shared wrongly or transferred wrongly therefore raises, or changes the output.
``FastFakeRunner`` touches no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.cache.paged import PagedKV
from kvferry.engine.block_moves import move_blocks
from kvferry.engine.plan import LayerDone, LogitEdits, RowLogprobs, StepPlan, StepResult

FAKE_HEAD_DIM = 4
FORCING_BIAS = 100.0
"""A logit bias this large forces its token, and its negative bans it."""

Hook = Callable[[StepPlan], None]
LayerHook = Callable[[StepPlan, int], None]


class WrongKV(AssertionError):
    """The paged cache does not hold what a sequence's context must be."""


def fake_next_token(
    tokens: Sequence[int] | NDArray[Any], vocab_size: int, seed: int = 0, sample_index: int = 0
) -> int:
    """The token that a fake model puts after ``tokens``. Greedy rows count as seed 0, sample 0."""
    state = blake2b(np.asarray(tokens, dtype="<i8").tobytes(), digest_size=8)
    state.update(seed.to_bytes(8, "little") + sample_index.to_bytes(4, "little"))
    return int.from_bytes(state.digest(), "little") % vocab_size


def fake_output(
    prompt: Sequence[int], num_tokens: int, vocab_size: int, seed: int = 0
) -> list[int]:
    """The first ``num_tokens`` output tokens of a prompt, without stop rules."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(fake_next_token(tokens, vocab_size, seed))
    return tokens[len(prompt) :]


class FakeRunner:
    """Runner whose model is :func:`fake_next_token`, on a real paged cache with head_dim 4.

    The cache is float32 or float64, so that token ids are exact.

    KV is written layer by layer, so that whoever reads a layer too early reads what was there
    before. ``before_execute`` runs before anything is read, ``before_layer`` before each layer is
    written, ``delay`` after all are and before the result returns. Raises WrongKV.
    """

    def __init__(
        self,
        kv: PagedKV,
        vocab_size: int,
        *,
        before_execute: Hook | None = None,
        before_layer: LayerHook | None = None,
        delay: Hook | None = None,
    ) -> None:
        if kv.head_dim != FAKE_HEAD_DIM:
            raise WrongKV(f"the fake model needs head_dim {FAKE_HEAD_DIM}, not {kv.head_dim}")
        self._kv = kv
        # Shares memory with the tensor: [L, 2, num_slots, H, 4].
        self._slots: NDArray[Any] = kv.slots.numpy()
        self._vocab_size = vocab_size
        self._before_execute = before_execute
        self._before_layer = before_layer
        self._delay = delay
        self.num_steps = 0

    def execute(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        if self._before_execute is not None:
            self._before_execute(plan)
        move_blocks(self._kv, plan)
        if not len(plan.query_lens):
            return StepResult(token_ids=np.zeros(0, dtype=np.int64))
        contexts, writes = self._slots_of(plan)
        self._check_no_overlap(contexts, writes)
        known = [self._read(i, slots) for i, slots in enumerate(contexts)]
        new = np.split(plan.token_ids, np.cumsum(plan.query_lens)[:-1])
        spelled = [
            self._encode(tokens, int(context))
            for tokens, context in zip(new, plan.context_lens, strict=True)
        ]
        self._write(plan, writes, spelled, layer_done or _nobody)
        result = StepResult(token_ids=np.zeros(len(plan.sampled), dtype=np.int64))
        for row, seq in enumerate(plan.sampled):
            self._sample(plan, row, np.concatenate([known[seq], new[seq]]), result)
        self.num_steps += 1
        if self._delay is not None:
            self._delay(plan)
        return result

    def _write(
        self,
        plan: StepPlan,
        slots: list[NDArray[np.int64]],
        spelled: list[NDArray[Any]],
        layer_done: LayerDone,
    ) -> None:
        layer_done(0, None)
        for layer in range(self._kv.num_layers):
            if self._before_layer is not None:
                self._before_layer(plan, layer)
            for where, what in zip(slots, spelled, strict=True):
                self._slots[layer][:, where] = what[layer]
            layer_done(layer + 1, None)

    def check_context(self, block_table: Sequence[int], tokens: Sequence[int]) -> None:
        """Raise WrongKV unless the cache holds exactly ``tokens`` under ``block_table``."""
        table = np.asarray(block_table, dtype=np.int64)
        found = self._read(0, self._token_slots(table, 0, len(tokens)))
        if found.tolist() != list(tokens):
            raise WrongKV(f"the cache holds tokens {found.tolist()}, not {list(tokens)}")

    def _slots_of(self, plan: StepPlan) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        contexts, writes = [], []
        for table, context, query in zip(
            plan.block_tables, plan.context_lens, plan.query_lens, strict=True
        ):
            contexts.append(self._token_slots(table, 0, int(context)))
            writes.append(self._token_slots(table, int(context), int(context + query)))
        return contexts, writes

    def _token_slots(self, table: NDArray[Any], start: int, end: int) -> NDArray[np.int64]:
        size = self._kv.block_size
        positions = np.arange(start, end, dtype=np.int64)
        blocks = table.astype(np.int64)[positions // size]
        if blocks.size and not 0 <= blocks.min() <= blocks.max() < self._kv.num_blocks:
            raise WrongKV(f"block table {table.tolist()} names a block outside the cache")
        return blocks * size + positions % size

    def _check_no_overlap(
        self, contexts: list[NDArray[np.int64]], writes: list[NDArray[np.int64]]
    ) -> None:
        written = np.concatenate(writes)
        if np.unique(written).size != written.size:
            raise WrongKV("two tokens of one step are written to the same slot")
        if np.isin(written, np.concatenate(contexts)).any():
            raise WrongKV("a slot that a sequence reads is written in the same step")

    def _read(self, seq: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of a context, after checking that every layer, head, key and value spells them."""
        found = self._slots[:, :, slots]
        tokens = np.asarray(found[0, 0, :, 0, 0].astype(np.int64))
        wrong = (found != self._encode(tokens, 0)).any(axis=(0, 1, 3, 4))
        if wrong.any():
            position = int(np.flatnonzero(wrong)[0])
            spelled = found[:, :, position].tolist()
            raise WrongKV(f"sequence {seq}, position {position}: the cache holds {spelled}")
        return tokens

    def _encode(self, tokens: NDArray[np.int64], start: int) -> NDArray[Any]:
        """KV [L, 2, num_tokens, H, 4] of tokens from position ``start``; values are -(key + 1)."""
        kv = self._kv
        shape = (kv.num_layers, 2, len(tokens), kv.num_kv_heads, FAKE_HEAD_DIM)
        spelled = np.empty(shape, dtype=self._slots.dtype)
        spelled[..., 0] = tokens[:, None]
        spelled[..., 1] = np.arange(start, start + len(tokens))[:, None]
        spelled[..., 2] = np.arange(kv.num_layers)[:, None, None, None]
        spelled[..., 3] = np.arange(kv.num_kv_heads)
        spelled[:, 1] = -(spelled[:, 1] + 1)
        return spelled

    def _sample(
        self, plan: StepPlan, row: int, tokens: NDArray[np.int64], result: StepResult
    ) -> None:
        rows = plan.sampling
        if rows.position[row] != len(tokens):
            raise WrongKV(f"row {row} samples position {rows.position[row]}, not {len(tokens)}")
        greedy = rows.temperature[row] == 0
        seed, index = (0, 0) if greedy else (int(rows.seed[row]), int(rows.sample_index[row]))
        token = fake_next_token(tokens, self._vocab_size, seed, index)
        token = _edited(token, rows.edits.get(row), self._vocab_size)
        result.token_ids[row] = token
        if row in rows.logprobs:
            top = ((token + i) % self._vocab_size for i in range(rows.logprobs[row]))
            ranked = tuple((other, -float(i)) for i, other in enumerate(top))
            result.logprobs[row] = RowLogprobs(token_id=token, logprob=0.0, top=ranked)


class FastFakeRunner:
    """Runner that computes nothing: row r of step s yields token (s + r) mod vocab_size."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def execute(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        rows = np.arange(plan.step, plan.step + len(plan.sampled), dtype=np.int64)
        return StepResult(token_ids=rows % self._vocab_size)


def _nobody(layers: int, event: object) -> None:
    """Nobody wants to know which layers are done."""


def _edited(token: int, edits: LogitEdits | None, vocab_size: int) -> int:
    """The token after bans and forcing biases."""
    if edits is None:
        return token
    banned = set(edits.banned_ids)
    banned.update(t for t, bias in edits.logit_bias.items() if bias <= -FORCING_BIAS)
    for candidate, bias in edits.logit_bias.items():
        if bias >= FORCING_BIAS and candidate not in banned:
            return candidate
    while token in banned:
        token = (token + 1) % vocab_size
    return token
