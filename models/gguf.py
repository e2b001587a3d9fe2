"""GGUF files read as if they were Hugging Face checkpoints.

Metadata becomes the values of a ``config.json``; tensors are dequantised one by one under their
Hugging Face names. llama.cpp stores the q and k rows of llama models so that rotated pairs are
neighbours; that is undone here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvferry.core.errors import ModelLoadError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_PERMUTED = "llama"
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r"})
"""Vocabularies whose text is cut at every digit before the usual byte-level split."""


class GgufFile:
    """One GGUF file, memory-mapped. Raises ModelLoadError where it is damaged or not supported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ModelLoadError(f"{path}: is not a whole GGUF file: {error}") from None
        self.architecture = self._need("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            supported = ", ".join(_ARCHITECTURES)
            raise ModelLoadError(
                f"{path}: architecture {self.architecture!r} is not supported; "
                f"supported in GGUF are {supported}"
            )
        if self._own("expert_count", 0):
            raise ModelLoadError(f"{path}: mixture-of-experts models are not supported")
        self._tensors = {
            self._name(t.name): t for t in self._reader.tensors if t.name != _ROPE_FACTORS
        }
        self._factors = next((t for t in self._reader.tensors if t.name == _ROPE_FACTORS), None)

    @property
    def pre_tokenizer(self) -> str:
        return str(self._get("tokenizer.ggml.pre", ""))

    @property
    def num_tokens(self) -> int:
        """Tokens in the vocabulary."""
        field = self._reader.fields.get("tokenizer.ggml.tokens")
        return 0 if field is None else len(field.data)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor."""
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """One tensor, dequantised to float32 (float64 if stored so), in Hugging Face row order."""
        stored = self._tensors[name]
        if stored.tensor_type is gguf.GGMLQuantizationType.F64:
            values = np.array(stored.data)
        else:
            try:
                values = gguf.quants.dequantize(stored.data, stored.tensor_type)
            except RuntimeError:  # what the gguf package says to an unknown type
                kind = stored.tensor_type.name
                raise ModelLoadError(
                    f"{self.path}: tensor {stored.name} has unsupported type {kind}"
                ) from None
        values = values.reshape(self.shapes()[name])
        if self.architecture == _PERMUTED and ".q_proj." in name:
            values = _unpermute(values, self._own("attention.head_count"))
        if self.architecture == _PERMUTED and ".k_proj." in name:
            values = _unpermute(values, self._num_kv_heads)
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def config(self) -> dict[str, Any]:
        """The values of a ``config.json``."""
        embedding = self.shapes().get("model.embed_tokens.weight")
        if embedding is None:
            raise ModelLoadError(f"{self.path}: has no tensor token_embd.weight")
        num_heads, hidden_size = self._own("attention.head_count"), self._own("embedding_length")
        head_dim = self._own("attention.key_length", hidden_size // num_heads)
        if self._own("rope.dimension_count", head_dim) != head_dim:
            raise ModelLoadError(f"{self.path}: partial rotary embeddings are not supported")
        eos = [self._get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
        biased = "model.layers.0.self_attn.q_proj.bias" in self._tensors
        return {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "num_hidden_layers": self._own("block_count"),
            "hidden_size": hidden_size,
            "intermediate_size": self._own("feed_forward_length"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._num_kv_heads,
            "head_dim": head_dim,
            "vocab_size": embedding[0],
            "max_position_embeddings": self._own("context_length"),
            "rms_norm_eps": self._own("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._own("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "attention_bias": biased and self.architecture != "qwen2",
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self._get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": [token for token in dict.fromkeys(eos) if token is not None] or None,
        }

    @property
    def _num_kv_heads(self) -> int:
        return int(self._own("attention.head_count_kv", self._own("attention.head_count")))

    def _rope_scaling(self) -> dict[str, Any] | None:
        if self._factors is not None:
            # Llama 3.1 and later: the file holds the finished divisors of the frequencies, not the
            # parameters they came from. Divisors that hold at every length are longrope with equal
            # short and long factors.
            divisors = [float(value) for value in np.array(self._factors.data).reshape(-1)]
            return {
                "rope_type": "longrope",
                "short_factor": divisors,
                "long_factor": divisors,
                "attention_factor": 1.0,
                "factor": 1.0,
            }
        kind = self._own("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self._own("rope.scaling.factor")}
        original = self._own("rope.scaling.original_context_length", None)
        return scaling | ({"original_max_position_embeddings": original} if original else {})

    def _name(self, stored: str) -> str:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
        if match is None or match[2] not in _TENSORS:
            raise ModelLoadError(f"{self.path}: tensor {stored} is of no supported kind")
        part = f"{_TENSORS[match[2]]}.{match[3]}"
        return part if match[1] is None else f"model.layers.{match[1]}.{part}"

    def _get(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            return default
        if field.types == [gguf.GGUFValueType.FLOAT32]:
            # The decimal that was meant: 1e-05, not 9.999999747378752e-06.
            return float(str(np.float32(field.contents())))
        return field.contents()

    def _need(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            raise ModelLoadError(f"{self.path}: has no metadata {key}")
        return value

    def _own(self, key: str, *default: Any) -> Any:
        """A value under the architecture's own prefix; without a default it must be there."""
        full = f"{self.architecture}.{key}"
        return self._get(full, default[0]) if default else self._need(full)


def save_tokenizer(source: GgufFile, out: Path) -> None:
    """Write the tokenizer that a GGUF file describes as ``tokenizer.json`` and its companions.

    Raises ModelLoadError if the file describes none that is supported.
    """
    path = source.path
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{path}: no tokenizer can be read from this file: {error}") from None
    if source.pre_tokenizer in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.save_pretrained(out)
    _drop_foreign_tokens(out / "tokenizer.json", source.num_tokens)


def _drop_foreign_tokens(path: Path, num_tokens: int) -> None:
    """Remove special tokens that the conversion adds by habit though the model has no row for
    them.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    values["added_tokens"] = [t for t in values["added_tokens"] if t["id"] < num_tokens]
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def _unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (head, pair, half) back to (head, half, pair)."""
    halves = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
