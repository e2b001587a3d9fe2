"""GGUF files written from reference models, as llama.cpp's converter lays them out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    rope_factors: list[float] | None = None,
    sentencepiece: bool = False,
) -> Path:
    """Write weights, sizes and a small tokenizer, byte-level or sentencepiece. Matrices are
    stored as ``kind``.

    ``extra`` holds metadata under the architecture's prefix. The model's parameters are set to
    what was stored, so that it stays the reference for the file.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, architecture, model.config, extra or {})
    add_tokenizer = _add_sentencepiece if sentencepiece else _add_byte_level
    add_tokenizer(writer, model.config.vocab_size)
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if tied and name.startswith("lm_head"):
            continue
        values = parameter.detach().to(torch.float32).numpy()
        quantised = kind if values.ndim == 2 else GGMLQuantizationType.F32
        data = gguf.quants.quantize(values, quantised)
        parameter.data = torch.from_numpy(np.array(gguf.quants.dequantize(data, quantised))).to(
            parameter.dtype
        )
        if architecture == "llama" and re.search(r"\.([qk])_proj\.", name):
            heads = model.config.num_attention_heads
            heads = heads if ".q_proj." in name else model.config.num_key_value_heads
            data = _interleave(data, heads)
        raw = None if quantised is GGMLQuantizationType.F32 else quantised
        writer.add_tensor(_gguf_name(name), data, raw_dtype=raw)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, prefix: str, config: Any, extra: dict[str, Any]) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in extra.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[
            type(value)
        ]
        add(f"{prefix}.{key}", value)


def _add_sentencepiece(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """As Llama 2 has it: bytes as a last resort, a mark for spaces, a BOS before every text."""
    control = ["<unk>", "<s>", "</s>"]
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", *"abcdefgh", "▁a", "ab", "▁ab"]
    unused = [f"unused{i}" for i in range(vocab_size - len(control) - len(spelled) - len(pieces))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*control, *spelled, *pieces, *unused])
    writer.add_token_scores(
        [0.0] * (len(control) + len(spelled)) + [-float(i) for i in range(vocab_size - 259)]
    )
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (vocab_size - 259))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


def _add_byte_level(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    control = ["<unk>", "<s>", "</s>"]
    letters = [chr(code) for code in range(33, 33 + vocab_size - len(control) - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*control, *letters, "ab"])
    writer.add_token_types([3] * len(control) + [1] * (len(letters) + 1))
    writer.add_token_merges(["a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_name(name: str) -> str:
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    assert match is not None, name
    stored = f"{_NAMES[match[2]]}.{match[3]}"
    return stored if match[1] is None else f"blk.{match[1]}.{stored}"


def _interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (head, half, pair) to (head, pair, half), as llama.cpp stores q and k of llama."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))
