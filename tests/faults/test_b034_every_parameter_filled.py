"""B034: no parameter keeps its random start: each one that a family has is filled from the
checkpoint or named, and a tied head is the embedding, in every family.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, our_logits, reference_logits, save, some_tokens, tiny_model
from tiny_tokenizer import save_tokenizer

from kvferry.core.errors import ModelLoadError
from kvferry.models.load import load_model, resolve

HEAD = "lm_head.weight"
DROP = object()


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not DROP}))


def drop(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    weights = {key: tensor.clone() for key, tensor in load_file(path).items() if key != name}
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_each_parameter_of_each_family(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, torch.float32, num_hidden_layers=1)
    names = [name for name, _ in model.named_parameters()]
    for i, name in enumerate(names):
        folder = save(model, tmp_path / str(i))
        drop(folder, name)
        with pytest.raises(ModelLoadError, match=f"tensor {name.replace('.', '[.]')}"):
            load_model(folder, torch.float32)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_is_the_embedding(family: str, nested: bool, tmp_path: Path) -> None:
    model = tiny_model(family, torch.float64, tie_word_embeddings=True)
    folder = save(model, tmp_path)
    assert HEAD not in load_file(folder / "model.safetensors")
    if nested:
        edit_config(folder, tie_word_embeddings=DROP, text_config={"tie_word_embeddings": True})
    decoder = load_model(folder, torch.float64)
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight
    tokens = some_tokens(12)
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(our_logits(decoder, tokens), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("flag", [DROP, False, None])
def test_without_the_flag_a_missing_head_is_an_error(
    family: str, flag: Any, tmp_path: Path
) -> None:
    folder = save(tiny_model(family, torch.float32, tie_word_embeddings=True), tmp_path)
    edit_config(folder, tie_word_embeddings=flag)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "40KB"}])
def test_a_tied_model_that_is_converted_stays_tied(shards: dict[str, Any], tmp_path: Path) -> None:
    """The way from bfloat16 files to float64 workers."""
    model = tiny_model("llama", torch.bfloat16, tie_word_embeddings=True)
    source = save(model, tmp_path / "source", **shards)
    save_tokenizer(source)
    decoder = load_model(
        resolve(str(source), torch.float64, cache=tmp_path / "cache"), torch.float64
    )
    assert decoder.lm_head.weight.data_ptr() == decoder.model.embed_tokens.weight.data_ptr()
    tokens = some_tokens(12)
    expected = reference_logits(model.double(), tokens)
    torch.testing.assert_close(our_logits(decoder, tokens), expected, rtol=0, atol=1e-9)


def test_uninitialised_memory_would_be_seen(tmp_path: Path) -> None:
    """Unwritten memory is NaN in these tests: no parameter may hold any."""
    for family in FAMILIES:
        folder = save(tiny_model(family, torch.float32), tmp_path / family)
        for name, parameter in load_model(folder, torch.float32).named_parameters():
            assert torch.isfinite(parameter).all(), (family, name)
