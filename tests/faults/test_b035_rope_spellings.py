"""B035: however a config spells its rope scaling, the model that comes of it is the reference's,
below and above the original length; what is not understood is refused, not ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import our_logits, reference_logits, save, some_tokens, tiny_model

from kvferry.core.errors import ModelLoadError
from kvferry.models.load import load_model
from kvferry.models.spec import read_spec

ORIGINAL = 16
THETA = 5000.0
FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.1 * i for i in range(8)],
}
# name -> (the values beside the type, max_position_embeddings, context limit)
TYPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "default": ({}, 64, 64),
    "linear": ({"factor": 4.0}, ORIGINAL, 4 * ORIGINAL),
    "llama3": (
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        64,
        64,
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        ORIGINAL,
        4 * ORIGINAL,
    ),
    "longrope": ({**FACTORS, "original_max_position_embeddings": ORIGINAL}, 64, 64),
}
LENGTHS = {"below": ORIGINAL - 4, "above": 3 * ORIGINAL}


def write(folder: Path, name: str, container: str, key: str, spelled: str) -> Any:
    """Save a model of rope type ``name``, its config spelled as asked for; return the model."""
    values, max_position, _ = TYPES[name]
    rope = {"rope_type": name, "rope_theta": THETA, **values}
    model = tiny_model(
        "llama", torch.float64, max_position_embeddings=max_position, rope_parameters=rope
    )
    save(model, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config["rope_theta"] = THETA
    config[container] = {key: spelled, **values}
    path.write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("container", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", [*TYPES, "su"])
def test_logits_and_limit(name: str, container: str, key: str, tmp_path: Path) -> None:
    real = "longrope" if name == "su" else name
    model = write(tmp_path, real, container, key, name)
    assert read_spec(tmp_path).max_model_len == TYPES[real][2]
    for length in LENGTHS.values():
        # longrope picks its factors by the length of the sequence in the reference, and by the
        # context limit here: at or below the original length that is asked for.
        limit = ORIGINAL if real == "longrope" and length <= ORIGINAL else None
        decoder = load_model(tmp_path, torch.float64, limit)
        tokens = some_tokens(length)
        expected = reference_logits(model, tokens)
        torch.testing.assert_close(our_logits(decoder, tokens), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("container", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("above", [False, True])
def test_dynamic(above: bool, container: str, key: str, tmp_path: Path) -> None:
    """Fixed at load for the context limit, at which the reference is the same."""
    limit = 57 if above else ORIGINAL
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": THETA}
    model = tiny_model(
        "llama", torch.float64, max_position_embeddings=ORIGINAL, rope_parameters=rope
    )
    path = save(model, tmp_path) / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(
        json.dumps({**config, "rope_theta": THETA, container: {key: "dynamic", "factor": 4.0}})
    )
    assert read_spec(tmp_path).max_model_len == 4 * ORIGINAL
    tokens = some_tokens(limit)
    logits = our_logits(load_model(tmp_path, torch.float64, limit), tokens)
    torch.testing.assert_close(logits, reference_logits(model, tokens), rtol=0, atol=1e-9)


@pytest.mark.parametrize("container", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("absent", [None, {}])
def test_null_is_no_scaling(container: str, absent: Any, tmp_path: Path) -> None:
    model = write(tmp_path, "default", container, "type", "default")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), container: absent}))
    tokens = some_tokens(40)
    logits = our_logits(load_model(tmp_path, torch.float64), tokens)
    torch.testing.assert_close(logits, reference_logits(model, tokens), rtol=0, atol=1e-9)


@pytest.mark.parametrize("container", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "no-such-type", "factor": 2.0}, "no-such-type"),
        ({"rope_type": "no-such-type"}, "no-such-type"),
        ({"factor": 4.0}, "rope_type"),
        ({"factor": 4.0, "original_max_position_embeddings": 16}, "rope_type"),
        ({"rope_type": 5, "factor": 4.0}, "5"),
        ([4.0], "object"),
    ],
)
def test_what_is_not_understood_stops_start_up(
    container: str, scaling: Any, named: str, tmp_path: Path
) -> None:
    write(tmp_path, "default", "rope_scaling", "type", "default")
    path = tmp_path / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k != "rope_scaling"}
    path.write_text(json.dumps({**config, container: scaling}))
    with pytest.raises(ModelLoadError, match=named):
        load_model(tmp_path, torch.float64)
