"""Weights in panels: made once, mapped, refused and made anew when damaged or of another source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvferry.kernels.cpu.library import cpu_ops
from kvferry.kernels.cpu.panels import unpacked
from kvferry.kernels.ops import Backend
from kvferry.models.checkpoint import Checkpoint, fill_decoder
from kvferry.models.decoder import Decoder, Linear
from kvferry.models.packed import pack_weights, packed_file, packed_weights
from kvferry.models.spec import read_spec

pytestmark = pytest.mark.skipif(cpu_ops() is None, reason="the installation built no library")


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        tie_word_embeddings=request.param,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(folder: Path, cache: Path) -> Decoder:
    spec = read_spec(folder)
    panels = packed_weights(folder, spec, torch.float32, cache)
    return fill_decoder(spec, Checkpoint(folder), torch.float32, Backend.CPU, panels)


def linears(decoder: Decoder) -> dict[str, Linear]:
    return {name: m for name, m in decoder.named_modules() if isinstance(m, Linear)}


def packed_names(decoder: Decoder) -> set[str]:
    return {name for name, linear in linears(decoder).items() if linear.weight.dim() == 3}


def test_every_matrix_is_packed_once_and_holds_the_same_numbers(folder: Path, cache: Path) -> None:
    stages: list[str] = []
    pack_weights(folder, torch.float32, cache=cache, progress=stages.append)
    pack_weights(folder, torch.float32, cache=cache, progress=stages.append)
    assert stages == ["packing the weights of model for the CPU"]
    plain, ours = linears(load(folder, cache / "empty")), linears(load(folder, cache))
    assert packed_names(load(folder, cache)) == set(plain)
    for name, linear in ours.items():
        assert torch.equal(unpacked(linear.weight), plain[name].weight), name
        assert linear.weight.data_ptr() % 64 == 0


def test_two_decoders_map_the_same_pages(folder: Path, cache: Path) -> None:
    pack_weights(folder, torch.float32, cache=cache)
    before = Path("/proc/self/smaps").read_text().count(str(packed_file(folder, cache)))
    decoders = [load(folder, cache) for _ in range(2)]
    maps = Path("/proc/self/smaps").read_text().count(str(packed_file(folder, cache)))
    assert maps > before
    assert len(decoders) == 2


def test_without_panels_weights_stay_plain(folder: Path, cache: Path) -> None:
    assert packed_names(load(folder, cache)) == set()
    pack_weights(folder, torch.float64, cache=cache)
    assert not cache.exists()


@pytest.mark.parametrize("size", [0, 7, 200, -1])
def test_damaged_panels_are_not_used_and_made_anew(folder: Path, cache: Path, size: int) -> None:
    pack_weights(folder, torch.float32, cache=cache)
    path = packed_file(folder, cache)
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:size])
    assert packed_names(load(folder, cache)) == set()
    pack_weights(folder, torch.float32, cache=cache)
    assert path.read_bytes() == whole


def test_panels_of_another_model_are_not_used(folder: Path, cache: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    config = LlamaConfig.from_pretrained(folder, intermediate_size=64)
    LlamaForCausalLM(config).save_pretrained(other)
    for source in (folder, other):
        pack_weights(source, torch.float32, cache=cache)
    whole = packed_file(folder, cache).read_bytes()
    packed_file(folder, cache).write_bytes(packed_file(other, cache).read_bytes())
    assert packed_names(load(folder, cache)) == set()
    pack_weights(folder, torch.float32, cache=cache)
    assert packed_file(folder, cache).read_bytes() == whole


def test_changed_weights_have_other_panels(folder: Path, cache: Path) -> None:
    pack_weights(folder, torch.float32, cache=cache)
    before = packed_file(folder, cache)
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, 0))
    assert packed_file(folder, cache) != before
    assert packed_names(load(folder, cache)) == set()
    weights.unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        packed_file(folder, cache)
