"""A decoder shared out over ranks computes what it computes whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_threads import on_ranks
from tiny_models import FAMILIES, our_logits, save, some_tokens, tiny_model

from kvferry.core.errors import ConfigError
from kvferry.engine.collectives import TorchCollectives
from kvferry.models.decoder import Decoder
from kvferry.models.load import load_model
from kvferry.models.parallel import parallelise

TOKENS = some_tokens(11)


@pytest.fixture(scope="module", params=[*FAMILIES, "untied", "nine-heads"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own: dict[str, dict[str, object]] = {
        "untied": {"tie_word_embeddings": False},
        "nine-heads": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
    }
    name: str = request.param
    config = own.get(name, {})
    model = tiny_model("llama" if config else name, torch.float64, **config)
    return save(model, tmp_path_factory.mktemp(name))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_logits_are_those_of_the_whole(folder: Path, size: int) -> None:
    whole = our_logits(load_model(folder, torch.float64), TOKENS)

    def run(ranks: TorchCollectives) -> torch.Tensor:
        part = parallelise(load_model(folder, torch.float64), ranks)
        return our_logits(part, TOKENS)

    first, *others = on_ranks(size, run)
    torch.testing.assert_close(first, whole, rtol=1e-10, atol=1e-10)
    assert all(not logits.numel() for logits in others)  # rank 0 alone samples


def test_the_ranks_weights_are_parts_of_the_mapped_ones(folder: Path) -> None:
    whole = load_model(folder, torch.float64)
    size = whole.lm_head.weight.numel()

    def run(ranks: TorchCollectives) -> tuple[int, list[bool]]:
        decoder = load_model(folder, torch.float64)
        stores = [p.untyped_storage().data_ptr() for p in decoder.parameters()]
        part = parallelise(decoder, ranks)
        shared = [p.untyped_storage().data_ptr() in stores for p in part.parameters()]
        return part.lm_head.weight.numel(), shared

    counts, shared = zip(*on_ranks(3, run), strict=True)
    assert sum(counts) == size
    assert all(all(parts) for parts in shared)


def test_a_step_without_sampled_rows_gathers_nothing(folder: Path) -> None:
    def run(ranks: TorchCollectives) -> torch.Size:
        part = parallelise(load_model(folder, torch.float64), ranks)
        return part.logits(torch.zeros(0, part.model.norm.weight.numel()).double()).shape

    assert on_ranks(2, run)[0][0] == 0


def test_more_ranks_than_heads_are_refused(folder: Path) -> None:
    class Many:
        rank = 0
        size = 99

    decoder: Decoder = load_model(folder, torch.float64)
    with pytest.raises(ConfigError, match=r"decode.tp: 99 ranks"):
        parallelise(decoder, Many(), "decode.tp")  # type: ignore[arg-type]
