"""The entire path in one process with fakes. Read it as the tutorial.

Real: the router's spine, queue, policy and index; both roles with their step loops, schedulers,
block pools and prefix caches; the KV plane with its leases, slabs and digests. Fake: the model (its
next token depends on every token of the context, read back from the paged cache, so that one wrong
block gives a wrong answer), the session's stream (no gRPC) and the slab transport (loopback).
"""

from __future__ import annotations

from fake_engine_model import expected
from gates import HoldAt
from local_system import EOS, fake_backend, local_config, local_system

from kvferry.core.request import FinishReason

PROMPT = list(range(10, 31))  # 21 tokens: five full blocks of 4 and a tail


async def test_a_prompt_travels_router_prefill_transfer_decode_and_comes_back() -> None:
    # The gate holds nothing here; it notes the states that requests are in when they may move on.
    p_gate, d_gate = HoldAt(), HoldAt()
    config = local_config(prefill={"block_size": 4}, decode={"block_size": 8})
    async with local_system(config, prefill_gate=p_gate, decode_gate=d_gate) as system:
        steps = await system.steps(PROMPT, max_tokens=6)

        # One token came from the prefill worker, the rest from the decode worker, step by step.
        assert [len(step.token_ids) for step in steps] == [1] * 6
        assert [token for step in steps for token in step.token_ids] == expected(PROMPT, 6)
        assert steps[-1].finish_reason is FinishReason.LENGTH

        # It waited for a reservation, was prefilled in two chunks of at most 16 tokens, and decoded
        # only once its KV had been verified.
        assert p_gate.seen == ["waiting", "prefilling"]
        assert d_gate.seen == ["waiting", "reserved", "decoding"]

        timeline = system.timelines[0]
        assert (timeline.prefill_worker, timeline.decode_worker) == ("prefill-0", "decode-0")
        # 2 layers, K and V, 1 head of 4 numbers of 8 bytes, for each of the 21 tokens.
        assert timeline.transfer_bytes == 21 * 2 * 2 * 4 * 8
        assert timeline.attempts == 1

        # Nobody keeps a block; what was full stays cached, in each side's own block size.
        await system.settled()
        assert system.counts()["prefill-0"].cached == 21 // 4
        assert system.counts()["decode-0"].cached == (21 + 5) // 8


async def test_a_cached_prefix_is_neither_computed_nor_shipped_again() -> None:
    config = local_config(prefill={"block_size": 4}, decode={"block_size": 8})
    async with local_system(config) as system:
        await system.generate(PROMPT)
        follow_up = [*PROMPT, 5, 6, 7]
        assert await system.generate(follow_up, max_tokens=3) == expected(follow_up, 3)
        timeline = system.timelines[-1]
        assert timeline.cached_tokens_prefill == 20
        assert timeline.cached_tokens_decode == 16
        assert timeline.transfer_bytes == (24 - 16) * 2 * 2 * 4 * 8


async def test_the_colocated_worker_gives_the_same_answer_without_a_transfer() -> None:
    config = local_config(prefill={"workers": 0}, decode={"role": "both"})
    async with local_system(config) as system:
        assert await system.generate(PROMPT, max_tokens=6) == expected(PROMPT, 6)
        timeline = system.timelines[0]
        assert timeline.transfer_bytes == 0
        assert timeline.prefill_worker == timeline.decode_worker == "both-0"
        await system.settled()


async def test_a_single_token_asks_no_decode_worker() -> None:
    async with local_system(local_config()) as system:
        assert await system.generate(PROMPT, max_tokens=1) == expected(PROMPT, 1)
        assert system.timelines[0].decode_worker == ""
        assert system.counts()["decode-0"].free == 64


async def test_a_first_token_that_ends_the_answer_ends_it_everywhere() -> None:
    # B008: the token sampled by the prefill worker obeys the stop rules like any other.
    config = local_config()
    async with local_system(config, lambda size: fake_backend(size, eos=(EOS,))) as system:
        steps = await system.steps(PROMPT, logit_bias={EOS: 100.0})
        assert [step.token_ids for step in steps] == [(EOS,)]
        assert steps[0].finish_reason is FinishReason.STOP
        await system.settled()

        ignored = await system.steps(PROMPT, logit_bias={EOS: 100.0}, ignore_eos=True, max_tokens=4)
        assert [step.token_ids for step in ignored] == [(EOS,)] * 4
        assert ignored[-1].finish_reason is FinishReason.LENGTH
