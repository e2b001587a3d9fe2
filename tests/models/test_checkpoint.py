"""Incomplete or damaged checkpoints stop start-up by name; whole ones cost no copy (B034, B036)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import our_logits, reference_logits, save, some_tokens, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvferry.core.errors import ModelLoadError
from kvferry.models.identity import weights_digest
from kvferry.models.load import load_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DROP = object()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    return save(tiny_model("llama", torch.float32), folder, max_shard_size="100KB")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("llama", torch.float32), tmp_path_factory.mktemp("single"))


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded, tmp_path / "copy")


@pytest.fixture
def single_copy(single: Path, tmp_path: Path) -> Path:
    return shutil.copytree(single, tmp_path / "copy")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not DROP}))


def edit_weights(folder: Path, **tensors: Any) -> None:
    path = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    weights |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({n: t for n, t in weights.items() if t is not DROP}, path, {"format": "pt"})


def logits(folder: Path) -> Tensor:
    return our_logits(load_model(folder, torch.float32), some_tokens(12))


@pytest.mark.parametrize("which", [0, 1, -1])
def test_missing_shard_is_named(copy: Path, which: int) -> None:
    gone = shards(copy)[which]
    gone.unlink()
    with pytest.raises(ModelLoadError, match=rf"{gone.name}: file is missing"):
        load_model(copy, torch.float32)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_truncated_shard_is_named(copy: Path, kept: float) -> None:
    cut = shards(copy)[1]
    whole = cut.read_bytes()
    cut.write_bytes(whole[: int(kept if kept > 1 else kept * len(whole))])
    with pytest.raises(ModelLoadError, match=rf"{cut.name}: truncated or damaged"):
        load_model(copy, torch.float32)


def test_garbage_instead_of_a_shard_is_named(copy: Path) -> None:
    damaged = shards(copy)[0]
    damaged.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelLoadError, match=rf"{damaged.name}: truncated or damaged"):
        load_model(copy, torch.float32)


def test_stale_files_are_ignored_by_rule(copy: Path, single: Path) -> None:
    """The index wins over any other file: over a whole other model, and over torn ones."""
    before = logits(copy)
    other = save(tiny_model("llama", torch.float32, seed=5), copy.parent / "other")
    shutil.copy(other / "model.safetensors", copy / "model.safetensors")
    (copy / "model-00099-of-00099.safetensors").write_bytes(b"half a download")
    (copy / "pytorch_model.bin").write_bytes(b"old")
    assert torch.equal(logits(copy), before)


def test_without_an_index_only_the_single_file_counts(single_copy: Path, sharded: Path) -> None:
    before = logits(single_copy)
    shutil.copy(shards(sharded)[0], single_copy)
    assert torch.equal(logits(single_copy), before)
    (single_copy / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: file is missing"):
        load_model(single_copy, torch.float32)


def test_index_naming_a_tensor_that_is_in_no_file(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    other = next(s.name for s in shards(copy) if s.name != values["weight_map"][name])
    values["weight_map"][name] = other
    index.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=rf"tensor {name} is not in {other}"):
        load_model(copy, torch.float32)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"metadata": {}}', '{"weight_map": 3}', '{"weight_map": {}}']
)
def test_damaged_index_is_named(copy: Path, text: str) -> None:
    (copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        load_model(copy, torch.float32)


def test_an_index_cannot_point_outside_its_folder(copy: Path) -> None:
    text = json.dumps({"weight_map": {HEAD: "../other/model.safetensors"}})
    (copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match="plain file name"):
        load_model(copy, torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        EMBEDDING,
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        HEAD,
    ],
)
def test_every_parameter_is_filled_or_named(single_copy: Path, name: str) -> None:
    edit_weights(single_copy, **{name.replace(".", "__"): DROP})
    with pytest.raises(ModelLoadError, match=rf"no tensor {name}"):
        load_model(single_copy, torch.float32)


def test_bias_missing_from_the_file(single_copy: Path) -> None:
    edit_config(single_copy, attention_bias=True)
    with pytest.raises(
        ModelLoadError, match=r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"
    ):
        load_model(single_copy, torch.float32)


def test_wrong_shape_and_type_are_named(single_copy: Path) -> None:
    edit_weights(single_copy, model__norm__weight=torch.ones(63))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[63\].*\[64\]"):
        load_model(single_copy, torch.float32)
    edit_weights(single_copy, model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has type I8"):
        load_model(single_copy, torch.float32)


@pytest.mark.parametrize("place", ["outer", "nested"])
def test_tied_without_a_head_tensor(place: str, tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float64, tie_word_embeddings=True)
    folder = save(model, tmp_path)
    assert HEAD not in load_file(folder / "model.safetensors")
    if place == "nested":
        edit_config(folder, tie_word_embeddings=DROP, text_config={"tie_word_embeddings": True})
    decoder = load_model(folder, torch.float64)
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight
    token_ids = some_tokens(12)
    expected = reference_logits(model, token_ids)
    torch.testing.assert_close(our_logits(decoder, token_ids), expected, rtol=0, atol=1e-9)


def test_without_the_flag_a_head_tensor_is_needed(tmp_path: Path) -> None:
    folder = save(tiny_model("llama", torch.float32, tie_word_embeddings=True), tmp_path)
    edit_config(folder, tie_word_embeddings=DROP)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("flag", [DROP, False])
def test_without_the_flag_the_stored_head_is_used(single_copy: Path, flag: Any) -> None:
    edit_config(single_copy, tie_word_embeddings=flag)
    decoder = load_model(single_copy, torch.float32)
    weights = load_file(single_copy / "model.safetensors")
    assert torch.equal(decoder.lm_head.weight, weights[HEAD])
    assert torch.equal(decoder.model.embed_tokens.weight, weights[EMBEDDING])


@pytest.mark.parametrize("stored", ["equal", "different", "head only"])
def test_tied_with_a_head_tensor(single_copy: Path, stored: str) -> None:
    """As the reference: one storage where both agree or only one is there; untied where they
    differ.
    """
    edit_config(single_copy, tie_word_embeddings=True)
    weights = load_file(single_copy / "model.safetensors")
    if stored == "equal":
        edit_weights(single_copy, lm_head__weight=weights[EMBEDDING].clone())
    if stored == "head only":
        edit_weights(single_copy, model__embed_tokens__weight=DROP)
    decoder = load_model(single_copy, torch.float32)
    tied = decoder.lm_head.weight.data_ptr() == decoder.model.embed_tokens.weight.data_ptr()
    assert tied == (stored != "different")
    model = AutoModelForCausalLM.from_pretrained(single_copy, dtype=torch.float32)
    token_ids = some_tokens(12)
    expected = reference_logits(model, token_ids)
    torch.testing.assert_close(our_logits(decoder, token_ids), expected, rtol=0, atol=1e-3)


def mapped_ranges(path: Path) -> list[tuple[int, int]]:
    """Address ranges of this process that are backed by ``path``."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return [(int(start, 16), int(end, 16)) for start, end in spans]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_weights_in_the_compute_dtype_are_views_of_the_file(single: Path) -> None:
    first, second = load_model(single, torch.float32), load_model(single, torch.float32)
    ranges = mapped_ranges(single / "model.safetensors")
    for decoder in (first, second):
        for name, parameter in decoder.named_parameters():
            start, end = parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes
            assert any(low <= start and end <= high for low, high in ranges), name
    assert first.model.norm.weight.data_ptr() != second.model.norm.weight.data_ptr()


def test_nothing_is_trained(single: Path) -> None:
    decoder = load_model(single, torch.float32)
    assert not decoder.training
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    assert not any(torch.isnan(parameter).any() for parameter in decoder.parameters())


def test_identity_is_of_the_weights_that_count(sharded: Path, copy: Path) -> None:
    digest = weights_digest(sharded)
    assert weights_digest(copy) == digest
    (copy / "model-00099-of-00099.safetensors").write_bytes(b"")
    (copy / "README.md").write_text("words")
    assert weights_digest(copy) == digest
    edit_config(copy, rms_norm_eps=1e-5)
    assert weights_digest(copy) != digest
    with shards(copy)[0].open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    shutil.copy(sharded / "config.json", copy)
    assert weights_digest(copy) != digest
