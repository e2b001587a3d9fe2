"""GGUF files give the reference's logits and a whole Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import CHAT_TEMPLATE, write_gguf
from tiny_models import our_logits, reference_logits, some_tokens, tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvferry.core.errors import ModelLoadError
from kvferry.models.load import load_model, resolve
from kvferry.models.spec import read_spec
from kvferry.models.tokenizer import Tokenizer

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.original_context_length": 16,
}


def assert_equal_logits(model: PreTrainedModel, gguf: Path, cache: Path, length: int = 24) -> Path:
    folder = resolve(str(gguf), torch.float64, cache=cache)
    token_ids = some_tokens(length)
    logits = our_logits(load_model(folder, torch.float64), token_ids)
    torch.testing.assert_close(logits, reference_logits(model, token_ids), rtol=0, atol=1e-9)
    return folder


@pytest.mark.parametrize(
    ("family", "architecture", "config"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
        ("mistral", "llama", {}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}),
        ("qwen3", "qwen3", {}),
    ],
)
def test_families(family: str, architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(family, torch.float64, **config)
    gguf = write_gguf(tmp_path / "tiny.gguf", model, architecture)
    folder = assert_equal_logits(model, gguf, tmp_path / "cache")
    spec = read_spec(folder)
    assert spec.rms_norm_eps == model.config.rms_norm_eps
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert spec.tie_word_embeddings == model.config.tie_word_embeddings


@pytest.mark.parametrize(
    "kind",
    [
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_1,
    ],
)
def test_stored_types(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float64)
    gguf = write_gguf(tmp_path / "tiny.gguf", model, "llama", kind)
    assert_equal_logits(model, gguf, tmp_path / "cache")


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        (YARN, YARN_KEYS),
        (
            {"rope_type": "linear", "factor": 2.0},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        ),
    ],
)
def test_rope_scaling(rope: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float64, rope_parameters={**rope, "rope_theta": 10000.0})
    gguf = write_gguf(tmp_path / "tiny.gguf", model, "llama", extra=keys)
    assert_equal_logits(model, gguf, tmp_path / "cache", length=30)


def test_finished_rope_factors(tmp_path: Path) -> None:
    """Llama 3.1 files hold the divisors that llama3 scaling comes to."""
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
    }
    model = tiny_model("llama", torch.float64, rope_parameters=rope)
    unscaled = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (unscaled / model.model.rotary_emb.inv_freq).tolist()
    gguf = write_gguf(tmp_path / "tiny.gguf", model, "llama", rope_factors=factors)
    folder = resolve(str(gguf), torch.float64, cache=tmp_path / "cache")
    token_ids = some_tokens(24)
    logits = our_logits(load_model(folder, torch.float64), token_ids)
    # The divisors were rounded to float32 on their way, unlike what they were computed from.
    torch.testing.assert_close(logits, reference_logits(model, token_ids), rtol=0, atol=1e-4)


def test_tokenizer_comes_along(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", torch.float32), "llama")
    folder = resolve(str(gguf), torch.float32, cache=tmp_path / "cache")
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == 96
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.decode(tokenizer.encode("abba")) == "abba"
    # transformers' own conversion adds this one beyond the last row of the embedding.
    assert max(tokenizer.encode("a<|endoftext|>b")) < 96
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "user:hi;"
    assert CHAT_TEMPLATE in (folder / "chat_template.jinja").read_text()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_a_sentencepiece_tokenizer_comes_along(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32, vocab_size=300)
    gguf = write_gguf(tmp_path / "tiny.gguf", model, "llama", sentencepiece=True)
    tokenizer = Tokenizer(resolve(str(gguf), torch.float32, cache=tmp_path / "cache"))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert tokenizer.encode("ab")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.vocab_size == 300
    for text in ("ab", "ab ab  ab", "你好 😀 xyz", "line\nline"):
        assert tokenizer.encode(text) == theirs.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not tokenizer.has_chat_template


def bare_gguf(path: Path, architecture: str, **metadata: int) -> Path:
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "metadata", "named"),
    [
        ("mamba", {}, r"architecture 'mamba' is not supported.*llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "mixture-of-experts"),
        ("llama", {}, "token_embd"),
    ],
)
def test_unsupported_files_say_why(
    architecture: str, metadata: dict[str, int], named: str, tmp_path: Path
) -> None:
    path = bare_gguf(tmp_path / "x.gguf", architecture, **metadata)
    with pytest.raises(ModelLoadError, match=named):
        resolve(str(path), torch.float32, cache=tmp_path / "cache")


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.3, 0.9])
def test_truncated_file_is_named_and_leaves_nothing(kept: float, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_model("llama", torch.float32), "llama")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * kept)])
    cache = tmp_path / "cache"
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        resolve(str(cut), torch.float32, cache=cache)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    model.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(4)))
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_gate_inp.weight", model.model.extra.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        resolve(str(path), torch.float32, cache=tmp_path / "cache")
