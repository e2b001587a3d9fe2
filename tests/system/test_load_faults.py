"""What stops a worker's start-up, for either role, and what the operator is told (B036).

The actors' classes are started here as Ray starts them, without Ray. ``tests/models`` has the
faults of checkpoints one by one; here one of each kind travels the whole way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, save, tiny_model

from kvferry.core.errors import ConfigError, ModelLoadError, StartupError
from kvferry.decode_worker.actor import DecodeActor
from kvferry.models.weight_files import INDEX_FILE
from kvferry.prefill_worker.actor import PrefillActor

pytestmark = pytest.mark.slow

ROLES = ("prefill", "decode", "both")
LAYERS, KV_HEADS, HEAD_DIM, MODEL_LEN = 2, 2, 16, 64
TOKEN_NBYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    model = tiny_model("llama", torch.float64, max_position_embeddings=MODEL_LEN)
    return save(model, tmp_path / "model", max_shard_size="100KB")


async def start(role: str, folder: Path, model: dict[str, Any] | None = None, **pool: Any) -> None:
    """Start one worker and stop it again. Raises what its start-up raises."""
    values: dict[str, Any] = {"model": {"dtype": "float64"} | (model or {})}
    values["prefill" if role == "prefill" else "decode"] = {"block_size": 4} | pool
    if role == "both":
        values["prefill"] = {"workers": 0}
        values["decode"]["role"] = "both"
    kind = PrefillActor if role == "prefill" else DecodeActor
    actor = kind(f"{role}-0", values, "secret", lambda: "127.0.0.1")
    try:
        await actor.start(str(folder), VOCAB_SIZE)
    finally:
        await actor.stop()


def shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def miss_shard(folder: Path) -> str:
    shard(folder).unlink()
    return f"{shard_name(folder)}: file is missing"


def shard_name(folder: Path) -> str:
    names = json.loads((folder / INDEX_FILE).read_text())["weight_map"].values()
    return sorted(set(names))[1]


def cut_shard(folder: Path) -> str:
    whole = shard(folder).read_bytes()
    shard(folder).write_bytes(whole[: len(whole) // 2])
    return f"{shard_name(folder)}: truncated or damaged"


def forget_tensor(folder: Path) -> str:
    index = json.loads((folder / INDEX_FILE).read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return "model.layers.1.mlp.up_proj.weight"


def damage_index(folder: Path) -> str:
    (folder / INDEX_FILE).write_text("{")
    return INDEX_FILE


def miss_weights(folder: Path) -> str:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    return "model.safetensors: file is missing"


def miss_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json"


def damage_config(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": "llama"')
    return "config.json"


def another_architecture(folder: Path) -> str:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    path.write_text(json.dumps(config))
    return "config.json"


FAULTS = (
    miss_shard,
    cut_shard,
    forget_tensor,
    damage_index,
    miss_weights,
    miss_config,
    damage_config,
    another_architecture,
)


@pytest.mark.parametrize("role", ROLES)
async def test_a_whole_checkpoint_starts(role: str, folder: Path) -> None:
    await start(role, folder, kv_memory=MODEL_LEN * TOKEN_NBYTES)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_damaged_checkpoint_is_named(
    fault: Callable[[Path], str], role: str, folder: Path
) -> None:
    named = fault(folder)
    with pytest.raises(ModelLoadError, match=re.escape(named)):
        await start(role, folder)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("block_size", [4, 5, 48])
async def test_too_little_kv_memory_shows_the_arithmetic(
    role: str, block_size: int, folder: Path
) -> None:
    """The number that the message names is enough, and one byte less is not."""
    key = f"{'prefill' if role == 'prefill' else 'decode'}.kv_memory"
    tried = 1000
    for _ in range(3):
        with pytest.raises(ConfigError) as refused:
            await start(role, folder, block_size=block_size, kv_memory=tried)
        message = str(refused.value)
        assert refused.value.key == key
        assert message.startswith(f"{key}: ")
        assert "is room for" in message
        found = re.search(r"set it to (\d+)", message)
        assert found is not None
        told = int(found[1])
        if told - 1 == tried:
            break
        tried = told - 1
    blocks = max(4, -(-MODEL_LEN // block_size))
    assert told == blocks * block_size * TOKEN_NBYTES
    await start(role, folder, block_size=block_size, kv_memory=told)


async def test_a_shorter_context_needs_less_kv_memory(folder: Path) -> None:
    memory = 32 * TOKEN_NBYTES
    with pytest.raises(ConfigError, match=r"one sequence of 64 tokens needs 16.*max_model_len"):
        await start("decode", folder, kv_memory=memory)
    await start("decode", folder, {"max_model_len": 32}, kv_memory=memory)


async def test_a_context_beyond_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len"):
        await start("prefill", folder, {"max_model_len": MODEL_LEN + 1})


@pytest.mark.parametrize("pool", ["prefill", "decode"])
async def test_an_address_that_is_not_here_says_so(folder: Path, pool: str) -> None:
    with pytest.raises(StartupError, match=rf"^{pool}\.host: .*203\.0\.113\.7"):
        await start(pool, folder, host="203.0.113.7")
