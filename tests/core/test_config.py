from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from kvferry.core.config import (
    EMBEDDED_MODEL,
    ON_DEVICE,
    UNAUTHENTICATED,
    Config,
    load_config,
    parse_config,
)
from kvferry.core.dtypes import kv_flavour
from kvferry.core.errors import ConfigError, StartupError
from kvferry.kv_transfer.endpoints import TRANSPORTS, Medium


def write(folder: Path, text: str) -> Path:
    path = folder / "kvferry.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_one_prefill_and_one_decode_worker() -> None:
    config = load_config(None)
    assert (config.prefill.workers, config.decode.workers, config.decode.role) == (1, 1, "decode")
    assert config.model.name == EMBEDDED_MODEL
    assert config == Config()


def test_file_then_overrides(tmp_path: Path) -> None:
    path = write(
        tmp_path, "model:\n  path: /models/tiny.gguf\nprefill: {workers: 2, kv_memory: 1GiB}\n"
    )
    config = load_config(path, {"prefill.workers": 3, "decode.kv_memory": "64MiB"})
    assert config.model.name == "tiny"
    assert (config.prefill.workers, config.prefill.kv_memory) == (3, 2**30)
    assert config.decode.kv_memory == 64 * 2**20


def test_the_tree_is_frozen() -> None:
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.prefill.workers = 2  # type: ignore[misc]


def test_an_empty_file_means_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing yet\n")) == Config()


@pytest.mark.parametrize(
    ("values", "key", "says"),
    [
        ({"modle": {}}, "modle", "did you mean model?"),
        ({"prefill": {"worker": 1}}, "prefill.worker", "did you mean prefill.workers?"),
        ({"decode": {"zzz": 1}}, "decode.zzz", "known keys: workers, tp"),
        ({"decode": 3}, "decode", "must be a mapping"),
        ({"decode": None}, "decode", "must be a mapping"),
        ({"prefill": {"workers": "two"}}, "prefill.workers", "valid integer"),
        ({"prefill": {"kv_memory": "1 potato"}}, "prefill.kv_memory", "512MiB"),
        ({"prefill": {"kv_memory": 0}}, "prefill.kv_memory", "greater than 0"),
        ({"router": {"grpc": "50051"}}, "router.grpc", "HOST:PORT"),
        ({"transfer": {"lease_s": float("nan")}}, "transfer.lease_s", "finite"),
        ({"decode": {"workers": 0}}, "decode.workers", "at least 1"),
        ({"decode": {"kv_dtype": "int4"}}, "decode.kv_dtype", "float8_e4m3fn"),
        ({"model": {"dtype": "int8"}}, "model.dtype", "float64"),
        ({"prefill": {"kv_dtype": "int8"}}, "prefill.kv_dtype", "set decode.kv_dtype"),
        (
            {"model": {"kv_dtype": "int8"}, "transfer": {"wire_dtype": "float32"}},
            "prefill.kv_dtype",
            "wire's is float32",
        ),
        ({"transfer": {"transport": "pigeon"}}, "transfer.transport", "shm"),
        ({"transfer": {"wire_dtype": "int4"}}, "transfer.wire_dtype", "int8"),
        ({"transfer": {"streams": 0}}, "transfer.streams", "greater than or equal to 1"),
        ({"transfer": {"transport": "gloo"}}, "transfer.transport", "trusted_network: true"),
        ({"transfer": {"transport": "nixl"}}, "transfer.transport", "trusted_network: true"),
        (
            {"transfer": {"transport": "nccl", "trusted_network": True}},
            "transfer.transport",
            "between GPUs",
        ),
        ({"transfer": {"transport": "cuda_ipc"}}, "transfer.transport", "between GPUs"),
        ({"prefill": {"workers": 0}}, "prefill.workers", "decode.role: both"),
        ({"cluster": {"silence_s": 2.0}}, "cluster.silence_s", "twice"),
        ({"cluster": {"device": "tpu"}}, "cluster.device", "'cpu' or 'cuda'"),
        ({"transfer": {"slab": "1GiB"}}, "transfer.slab", "staging"),
        ({1: {}}, "1", "unknown key"),
    ],
)
def test_a_wrong_value_names_its_key(values: dict[Any, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    assert caught.value.key == key
    assert says in caught.value.message
    assert str(caught.value).startswith(f"{key}: ")


def test_the_rules_of_transports_are_those_of_their_table() -> None:
    key = Config.model_fields["transfer"].annotation.model_fields["transport"]
    assert set(get_args(key.annotation)) == {"auto", *TRANSPORTS}
    strangers = {name for name, found in TRANSPORTS.items() if not found.authenticates}
    assert set(UNAUTHENTICATED) == strangers
    on_device = {name for name, found in TRANSPORTS.items() if found.medium is Medium.DEVICE}
    assert set(ON_DEVICE) == on_device


def test_colocated_needs_no_prefill_pool() -> None:
    config = parse_config({"decode": {"role": "both"}, "prefill": {"workers": 0}})
    assert config.decode.role == "both"


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "a: [1\n"])
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=r"kvferry\.yaml"):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"absent\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_an_override_below_a_scalar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefill: must be a mapping"):
        load_config(write(tmp_path, "prefill: 2\n"), {"prefill.workers": 1})


def test_every_key_is_described() -> None:
    def walk(section: type[Any], prefix: str) -> list[str]:
        bare = []
        for name, field in section.model_fields.items():
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                bare += walk(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                bare.append(prefix + name)
        return bare

    assert walk(Config, "") == []


def test_damaged_yaml_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "damaged.yaml"
    path.write_text("model: [\n")
    with pytest.raises(ConfigError, match=r"damaged\.yaml: is not valid YAML") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prefill", "decode", "wanted", "wire", "flavour"),
    [
        ("float32", "float32", None, "float32", "float32"),
        ("float64", "float32", None, "float32", "float32"),
        ("float32", "float64", None, "float32", "float64 by way of float32"),
        ("float16", "bfloat16", None, "float16", "bfloat16 by way of float16"),
        ("float16", "float32", "float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "float32", "float32", "bfloat16"),
        ("float32", "float32", "int8", "int8", "float32 by way of int8"),
        ("int8", "int8", None, "int8", "int8"),
        ("float32", "float8_e4m3fn", None, "float8_e4m3fn", "float8_e4m3fn"),
        ("float32", "int8", "float32", "float32", "int8 by way of float32"),
    ],
)
def test_the_wire_and_what_it_costs(
    prefill: str, decode: str, wanted: str | None, wire: str, flavour: str
) -> None:
    """A lossy way into a cache never gives its blocks the names of exact ones."""
    config = parse_config(
        {
            "prefill": {"kv_dtype": prefill},
            "decode": {"kv_dtype": decode},
            "transfer": {"wire_dtype": wanted},
        }
    )
    assert config.kv_wire == wire
    assert kv_flavour(config.kv_dtype(config.decode), config.kv_wire) == flavour


def test_a_pool_s_kv_type_goes_before_the_model_s() -> None:
    config = parse_config(
        {"model": {"dtype": "float64", "kv_dtype": "float32"}, "decode": {"kv_dtype": "float16"}}
    )
    assert config.kv_dtype(config.prefill) == "float32"
    assert config.kv_dtype(config.decode) == config.kv_wire == "float16"
    both = {
        "prefill": {"workers": 0},
        "decode": {"role": "both"},
        "transfer": {"wire_dtype": "int8"},
    }
    assert parse_config(both).kv_wire == "float32"  # nothing travels
