"""config.json as a ModelSpec: families, defaults, rope under all its names (B035), limits."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import ConfigError, ModelLoadError
from kvferry.models.rope_spec import RopeType
from kvferry.models.spec import Family, parse_spec, read_spec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def config(architecture: str = "LlamaForCausalLM", **values: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], **values}


def test_llama_defaults() -> None:
    spec = parse_spec(LLAMA)
    assert spec.family is Family.LLAMA
    assert (spec.num_kv_heads, spec.head_dim, spec.max_model_len) == (4, 16, 2048)
    assert spec.rms_norm_eps == 1e-6
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm) == (False,) * 4
    assert not spec.tie_word_embeddings
    assert spec.rope.theta == 10000.0
    assert spec.eos_token_ids == ()
    assert spec.kv_elements_per_token == 2 * 2 * 4 * 16


def test_llama_biases_are_honoured() -> None:
    spec = parse_spec(config(attention_bias=True, mlp_bias=True))
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, True, True)


def test_qwen_families() -> None:
    qwen2 = parse_spec(config("Qwen2ForCausalLM", num_key_value_heads=2))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = parse_spec(config("Qwen3ForCausalLM", num_key_value_heads=2))
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_a_config_without_architectures_goes_by_its_model_type() -> None:
    values = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 4}
    del values["architectures"]
    assert parse_spec(values).family is Family.QWEN2


def test_unknown_architecture_names_it_and_the_supported_ones() -> None:
    with pytest.raises(
        ModelLoadError, match=r"MambaForCausalLM.*LlamaForCausalLM.*Qwen3ForCausalLM"
    ):
        parse_spec(config("MambaForCausalLM"))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_odd_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        parse_spec(config(**values))


@pytest.mark.parametrize("container", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_yarn_under_both_key_names_extends_the_context(container: str, key: str) -> None:
    spec = parse_spec(config(max_position_embeddings=32768, **{container: {key: "yarn", **YARN}}))
    assert spec.rope.type is RopeType.YARN
    assert spec.max_model_len == 4 * 32768


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("name", "values", "limit"),
    [
        ("default", {}, 8192),
        ("linear", {"factor": 4.0}, 4 * 8192),
        ("dynamic", {"factor": 2.0}, 2 * 8192),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 8192),
        ("longrope", {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, 8192),
        ("su", {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, 8192),
        ("yarn", {"factor": 4.0}, 4 * 8192),
    ],
)
def test_context_limit_of_each_type(
    key: str, name: str, values: dict[str, Any], limit: int
) -> None:
    spec = parse_spec(config(max_position_embeddings=8192, rope_scaling={key: name, **values}))
    assert spec.rope.type == ("longrope" if name == "su" else name)
    assert spec.max_model_len == limit


@pytest.mark.parametrize("container", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("empty", [None, {}])
def test_no_scaling(container: str, empty: dict[str, Any] | None) -> None:
    spec = parse_spec(config(rope_theta=5e5, **{container: empty}))
    assert (spec.rope.type, spec.rope.theta) == (RopeType.DEFAULT, 5e5)


def test_theta_inside_the_newer_container() -> None:
    assert parse_spec(config(rope_parameters={"rope_theta": 1e6})).rope.theta == 1e6
    both = config(rope_parameters={"rope_theta": 1e6}, rope_scaling={"type": "linear", "factor": 2})
    assert (parse_spec(both).rope.theta, parse_spec(both).rope.factor) == (1e6, 2)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "ntk-by-magic", "factor": 2.0}, "ntk-by-magic"),
        ({"rope_type": "mrope"}, "mrope"),
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": -1}, "factor"),
        ({"type": "yarn", "factor": "4"}, "factor"),
        ({"type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"type": "longrope", "short_factor": [1.0] * 8}, "long_factor"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor"),
        ("yarn", "rope_scaling"),
    ],
)
def test_rope_scaling_that_is_not_understood_is_refused(scaling: Any, named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        parse_spec(config(rope_scaling=scaling))


def test_sliding_window_caps_the_context_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        spec = parse_spec(config("MistralForCausalLM", num_key_value_heads=2))
    assert (spec.sliding_window, spec.max_model_len) == (4096, 4096)
    assert "131072 to 4096" in caplog.text
    with pytest.raises(ConfigError, match="4096"):
        spec.limited(8192)


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("MistralForCausalLM", {"sliding_window": None}),
        ("MistralForCausalLM", {"sliding_window": 131072}),
        ("Qwen2ForCausalLM", {"sliding_window": 512, "use_sliding_window": False}),
        ("LlamaForCausalLM", {"sliding_window": 512}),
    ],
)
def test_a_window_that_never_bites_caps_nothing(
    architecture: str, values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    values = {"num_key_value_heads": 2, "max_position_embeddings": 131072, **values}
    assert parse_spec(config(architecture, **values)).max_model_len == 131072
    assert caplog.text == ""


def test_qwen_window_in_use_caps_the_context() -> None:
    values = {"num_key_value_heads": 2, "sliding_window": 512, "use_sliding_window": True}
    assert parse_spec(config("Qwen2ForCausalLM", **values)).max_model_len == 512


def test_the_operators_limit() -> None:
    spec = parse_spec(LLAMA)
    assert spec.limited(None) is spec
    assert spec.limited(100).max_model_len == 100
    with pytest.raises(ConfigError, match=r"model\.max_model_len.*2048"):
        spec.limited(2049)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, [7, 2], (7, 2)),
        (None, 3, (3,)),
        (None, None, ()),
    ],
)
def test_eos_ids_of_both_files(
    in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    values = config(eos_token_id=in_config, bos_token_id=1)
    spec = parse_spec(values, {"eos_token_id": in_generation})
    assert spec.eos_token_ids == expected
    assert spec.bos_token_id == 1


def test_tie_flag_where_it_may_stand() -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "architectures"}
    outer = {"architectures": ["LlamaForCausalLM"]}
    assert parse_spec(config(tie_word_embeddings=True)).tie_word_embeddings
    nested = {**outer, "text_config": {**inner, "tie_word_embeddings": True}}
    assert parse_spec(nested).tie_word_embeddings
    assert parse_spec(
        {**outer, "tie_word_embeddings": True, "text_config": inner}
    ).tie_word_embeddings
    overruled = {
        "tie_word_embeddings": False,
        "text_config": {**inner, "tie_word_embeddings": True},
    }
    assert parse_spec({**outer, **overruled}).tie_word_embeddings


def test_files_are_named_in_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read: No such file"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json: is not valid JSON"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="JSON object"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config(hidden_act="relu")))
    with pytest.raises(ModelLoadError, match=r"config\.json: hidden_act"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 9]}')
    assert read_spec(tmp_path, 64).eos_token_ids == (4, 9)


def test_spec_and_tokenizer_load_no_torch() -> None:
    modules = "kvferry.models.spec, kvferry.models.tokenizer"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
