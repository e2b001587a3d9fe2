"""Logits equal the reference's, over families, rope variants, loaders and dtypes (B034, B035)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    MAX_POSITION,
    our_logits,
    reference_logits,
    save,
    some_tokens,
    tiny_model,
)

from kvferry.models.load import load_model

HALF_HEAD = {"llama": 8, "llama-bias": 8, "mistral": 12, "qwen2": 8, "qwen3": 12}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 16,
    "short_factor": "ramp 1.0",
    "long_factor": "ramp 2.0",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# name -> (scaling, tokens run, max_model_len). Where a type depends on the sequence's length in
# the reference, the length is one at which it is defined to be what we fix at load.
ROPES: dict[str, tuple[dict[str, Any], int, int | None]] = {
    "default": ({"rope_type": "default"}, 24, None),
    "linear": ({"rope_type": "linear", "factor": 2.0}, 40, None),
    "dynamic-below": ({"rope_type": "dynamic", "factor": 2.0}, 20, MAX_POSITION),
    "dynamic-above": ({"rope_type": "dynamic", "factor": 2.0}, 57, 57),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        24,
        None,
    ),
    "yarn": (YARN, 60, None),
    "yarn-mscale": (YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}, 40, None),
    "yarn-scale": (YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}, 40, None),
    "longrope-short": (LONG, 16, 16),
    "longrope-long": (LONG, 30, None),
    "longrope-scale": (LONG | {"attention_factor": 1.1, "factor": 3.0}, 30, None),
}


def rope_for(family: str, name: str) -> dict[str, Any]:
    """A variant's parameters, with longrope's factors as long as the family's head asks for."""
    rope = dict(ROPES[name][0], rope_theta=5000.0)
    for key, value in rope.items():
        if isinstance(value, str) and value.startswith("ramp"):
            start = float(value.split()[1])
            rope[key] = [start + 0.1 * i for i in range(HALF_HEAD[family])]
    return rope


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_equals_reference(family: str, rope: str, tmp_path: Path) -> None:
    _, length, max_model_len = ROPES[rope]
    model = tiny_model(family, torch.float64, rope_parameters=rope_for(family, rope))
    folder = save(model, tmp_path)
    token_ids = some_tokens(length)
    decoder = load_model(folder, torch.float64, max_model_len)
    expected = reference_logits(model, token_ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(our_logits(decoder, token_ids), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_reference(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, torch.float32, rope_parameters=rope_for(family, "yarn"))
    decoder = load_model(save(model, tmp_path), torch.float32)
    token_ids = some_tokens(50)
    expected = reference_logits(model, token_ids)
    torch.testing.assert_close(our_logits(decoder, token_ids), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_equals_reference(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, torch.float64)
    folder = save(model, tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    token_ids = some_tokens(24)
    logits = our_logits(load_model(folder, torch.float64), token_ids)
    torch.testing.assert_close(logits, reference_logits(model, token_ids), rtol=0, atol=1e-9)


def test_stored_dtype_may_differ_from_the_compute_dtype(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.bfloat16)
    decoder = load_model(save(model, tmp_path), torch.float64)
    token_ids = some_tokens(24)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float64)
    expected = reference_logits(model, token_ids)
    torch.testing.assert_close(our_logits(decoder, token_ids), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_the_truth_as_the_reference(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_model("qwen3", dtype)
    folder = save(model, tmp_path)
    token_ids = some_tokens(24)
    exact = our_logits(load_model(folder, torch.float64), token_ids)
    half = load_model(folder, dtype)
    assert half.dtype is dtype
    error = (our_logits(half, token_ids) - exact).abs().max()
    assert error < 2 * (reference_logits(model, token_ids) - exact).abs().max()


def test_frequencies_do_not_depend_on_the_sequence(tmp_path: Path) -> None:
    """A token's key is the same in a short and in a long sequence, or cached KV could not be
    shared.
    """
    rope = rope_for("llama", "dynamic-above")
    decoder = load_model(
        save(tiny_model("llama", torch.float64, rope_parameters=rope), tmp_path), torch.float64, 57
    )
    token_ids = some_tokens(57)
    short, whole = our_logits(decoder, token_ids[:9]), our_logits(decoder, token_ids)
    torch.testing.assert_close(short, whole[:9], rtol=0, atol=1e-12)
