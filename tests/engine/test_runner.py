"""The model runner against dense runs of the same decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from step_plans import step_plan
from tiny_models import dense_attend
from torch import nn

from kvferry.cache.paged import PagedKV
from kvferry.engine.plan import RowLogprobs, StepResult
from kvferry.engine.runner import ModelRunner
from kvferry.models.decoder import Decoder
from kvferry.models.spec import parse_spec

torch.set_num_threads(1)

VOCAB_SIZE = 90
"""The tokenizer's; the embedding has 96 rows."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def make_decoder() -> Decoder:
    """A tiny random float64 decoder."""
    decoder = Decoder(parse_spec(CONFIG))
    generator = torch.Generator().manual_seed(4)
    for name, parameter in list(decoder.named_parameters()):
        module = decoder.get_submodule(name.rpartition(".")[0])
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        weight = 1 + noise if parameter.ndim == 1 else noise
        setattr(module, name.rpartition(".")[2], nn.Parameter(weight, requires_grad=False))
    return decoder


def dense_logprobs(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [VOCAB_SIZE] of the token after ``tokens``, without any cache."""

    with torch.inference_mode():
        hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), dense_attend)
        return decoder.logits(hidden[-1:])[0, :VOCAB_SIZE].log_softmax(-1)


class Worker:
    """A runner and a cache in which each sequence owns every second block."""

    def __init__(self, block_size: int = 4, num_sequences: int = 2) -> None:
        self.decoder = make_decoder()
        self.num_sequences = num_sequences
        self.kv = PagedKV.allocate(
            num_layers=2,
            num_kv_heads=2,
            head_dim=8,
            block_size=block_size,
            num_blocks=num_sequences * -(-64 // block_size),
            dtype=torch.float64,
        )
        self.runner = ModelRunner(self.decoder, self.kv, VOCAB_SIZE)

    def table(self, seq: int) -> list[int]:
        return list(range(seq, self.kv.num_blocks, self.num_sequences))

    def step(self, queries: dict[int, list[int]], contexts: dict[int, int]) -> list[RowLogprobs]:
        """Compute tokens of some sequences; what each samples next."""
        result = self.execute(queries, contexts)
        assert not result.invalid
        logprobs = [result.logprobs[i] for i in range(len(queries))]
        assert [row.token_id for row in logprobs] == result.token_ids.tolist()
        return logprobs

    def execute(self, queries: dict[int, list[int]], contexts: dict[int, int]) -> StepResult:
        plan = step_plan(
            list(queries.values()),
            [contexts[seq] for seq in queries],
            [self.table(seq) for seq in queries],
            logprobs=dict.fromkeys(range(len(queries)), 2),
        )
        return self.runner.execute(plan)


def check(got: RowLogprobs, decoder: Decoder, tokens: list[int]) -> None:
    expected = dense_logprobs(decoder, tokens)
    assert got.token_id == int(expected.argmax())
    assert got.logprob == pytest.approx(float(expected.max()), abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_chunked_prefill_beside_decode_equals_dense(block_size: int, chunk: int) -> None:
    """One sequence decodes while the other is prefilled in chunks, then both decode."""
    rng = np.random.default_rng(block_size * 100 + chunk)
    worker = Worker(block_size)
    first, second = ([int(t) for t in rng.integers(0, VOCAB_SIZE, n)] for n in (5, 21))
    (got,) = worker.step({0: first}, {0: 0})
    check(got, worker.decoder, first)
    first.append(got.token_id)
    for start in range(0, len(second), chunk):
        part = second[start : start + chunk]
        one, two = worker.step({0: first[-1:], 1: part}, {0: len(first) - 1, 1: start})
        check(one, worker.decoder, first)
        check(two, worker.decoder, second[: start + chunk])
        first.append(one.token_id)
    second.append(two.token_id)
    for _ in range(3):
        contexts = {0: len(first) - 1, 1: len(second) - 1}
        one, two = worker.step({1: second[-1:], 0: first[-1:]}, contexts)[::-1]
        check(one, worker.decoder, first)
        check(two, worker.decoder, second)
        first.append(one.token_id)
        second.append(two.token_id)


@pytest.mark.parametrize("length", [1, 8, 9, 12])
def test_a_repeated_prompt_gives_the_same_result(length: int) -> None:
    """With all but the last token found in the cache, three times over (fault B011)."""
    worker = Worker(block_size=4, num_sequences=1)
    prompt = list(range(7, 7 + length))
    (cold,) = worker.step({0: prompt}, {0: 0})
    for cached in (length - 1, (length - 1) // 4 * 4, length - 1):
        (warm,) = worker.step({0: prompt[cached:]}, {0: cached})
        assert warm.token_id == cold.token_id
        assert warm.logprob == pytest.approx(cold.logprob, abs=1e-6)
        assert [t for t, _ in warm.top] == [t for t, _ in cold.top]


class CountingDecoder(Decoder):
    """Counts the rows that get logits."""

    rows: list[int]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        return super().logits(hidden)


def test_only_sampled_rows_get_logits() -> None:
    worker = Worker(num_sequences=3)
    decoder = CountingDecoder(parse_spec(CONFIG))
    decoder.load_state_dict(worker.decoder.state_dict(), assign=True)
    decoder.rows = []
    runner = ModelRunner(decoder, worker.kv, VOCAB_SIZE)
    queries, tables = [[1, 2, 3], [4], [5, 6]], [worker.table(seq) for seq in range(3)]
    result = runner.execute(step_plan(queries, [0, 0, 0], tables, sampled=[0, 2]))
    assert decoder.rows == [2]
    expected = [int(dense_logprobs(decoder, tokens).argmax()) for tokens in ([1, 2, 3], [5, 6])]
    assert result.token_ids.tolist() == expected
    decoder.rows.clear()
    result = runner.execute(step_plan(queries, [0, 0, 0], tables, sampled=[]))
    assert result.token_ids.tolist() == []
    assert decoder.rows == [0]


def test_every_layer_is_reported_when_its_kv_is_in_the_cache() -> None:
    worker = Worker(block_size=4)
    seen: list[tuple[int, list[bool]]] = []

    def layer_done(layers: int, event: object) -> None:
        assert event is None, "on the CPU nothing runs behind"
        seen.append((layers, worker.kv.tensor.flatten(1).any(dim=1).tolist()))

    plan = step_plan([[1, 2, 3, 4, 5], [6]], [0, 0], [worker.table(0), worker.table(1)])
    reported = worker.runner.execute(plan, layer_done)
    assert seen == [(0, [False, False]), (1, [True, False]), (2, [True, True])]
    assert reported.token_ids.tolist() == worker.runner.execute(plan).token_ids.tolist()


def test_a_row_with_invalid_logits_is_named() -> None:
    worker = Worker(num_sequences=3)
    worker.decoder.model.embed_tokens.weight[50] = torch.nan
    result = worker.execute({0: [1, 2], 1: [50, 3], 2: [4]}, {0: 0, 1: 0, 2: 0})
    assert result.invalid == (1,)
    for row, tokens in ((0, [1, 2]), (2, [4])):
        check(result.logprobs[row], worker.decoder, tokens)
