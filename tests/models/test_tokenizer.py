"""Text, chats and ids; one BOS in a chat whatever the tokenizer adds (B033)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import BOS_ID, CHAT_TEMPLATE, EOS_ID, save_tokenizer

from kvferry.core.errors import InvalidRequest, ModelLoadError
from kvferry.models.tokenizer import Tokenizer

TEXTS = [
    "plain ascii",
    "  two  spaces\n\ttab\r\n",
    "naïve café, Ångström",
    "你好，世界",
    "Привет, мир",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "😀👨‍👩‍👧‍👦🏳️‍🌈",
    "\u200bzero\ufeffwidth\x00nul",
]
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("bos"), add_bos=True))


@pytest.fixture(scope="module")
def without_bos(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("plain")))


def test_facts(with_bos: Tokenizer) -> None:
    assert with_bos.vocab_size == 3 + 256 + 1
    assert (with_bos.bos_token_id, with_bos.eos_token_id) == (BOS_ID, EOS_ID)
    assert with_bos.token(with_bos.vocab_size - 1) == "ab"
    assert with_bos.token(with_bos.vocab_size) is None
    assert with_bos.has_chat_template


def test_plain_text_keeps_the_tokenizers_default(
    with_bos: Tokenizer, without_bos: Tokenizer
) -> None:
    ids = without_bos.encode("hi")
    assert BOS_ID not in ids
    assert with_bos.encode("hi") == [BOS_ID, *ids]


def test_a_chat_has_exactly_one_bos(with_bos: Tokenizer, without_bos: Tokenizer) -> None:
    ids = with_bos.encode_chat(USER)
    assert ids.count(BOS_ID) == 1
    assert ids[0] == BOS_ID
    assert ids == without_bos.encode_chat(USER)
    assert with_bos.decode(ids) == "[user]hi[assistant]"


def test_the_template_gets_its_arguments(without_bos: Tokenizer) -> None:
    text = without_bos.render_chat(USER, add_generation_prompt=False)
    assert text == "<s>[user]hi"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "wizard", "content": "hi"}],
        [{"role": 1, "content": "hi"}],
        [{}],
    ],
)
def test_a_template_that_refuses_names_the_field(
    without_bos: Tokenizer, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        without_bos.encode_chat(messages)
    assert caught.value.field == "messages"
    assert without_bos.encode_chat(USER)


def test_the_templates_own_words_reach_the_client(without_bos: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="unknown role wizard"):
        without_bos.encode_chat([{"role": "wizard", "content": "hi"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.no_such_method() }}",
        "{{ 1 / 0 }}",
        "{% for m in messages %}",
        "{{ messages[7].content + 'x' }}",
    ],
)
def test_a_broken_template_is_a_refusal_not_a_crash(template: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode_chat(USER)
    assert caught.value.field == "messages"


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = Tokenizer(save_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(InvalidRequest):
        tokenizer.encode_chat(USER)


def test_no_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.encode_chat(USER)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(without_bos: Tokenizer, text: str) -> None:
    assert without_bos.decode(without_bos.encode(text)) == text


def test_special_tokens_are_left_out_unless_asked_for(without_bos: Tokenizer) -> None:
    ids = [BOS_ID, *without_bos.encode("hi"), EOS_ID]
    assert without_bos.decode(ids) == "hi"
    assert without_bos.decode(ids, skip_special_tokens=False) == "<s>hi</s>"


def test_half_a_character_decodes_to_the_replacement_character(without_bos: Tokenizer) -> None:
    ids = without_bos.encode("é")
    assert len(ids) == 2
    assert without_bos.decode(ids[:1]) == "\ufffd"
    assert without_bos.decode([]) == ""


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: file is missing"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer(tmp_path)


def test_a_template_of_its_own_file_counts(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat_template=None)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert Tokenizer(tmp_path).encode_chat(USER)[0] == BOS_ID


def test_a_limit_in_the_file_cuts_nothing(tmp_path: Path) -> None:
    """Some checkpoints carry the truncation of their training."""
    path = save_tokenizer(tmp_path) / "tokenizer.json"
    limit = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": limit}))
    assert len(Tokenizer(tmp_path).encode("x" * 50)) == 50


def test_threads_share_one_tokenizer(with_bos: Tokenizer) -> None:
    def work(text: str) -> tuple[list[int], list[int], str]:
        chat = with_bos.encode_chat([{"role": "user", "content": text}])
        return with_bos.encode(text), chat, with_bos.decode(chat)

    texts = [text * 50 for text in TEXTS]
    expected = [work(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, texts * 20)) == expected * 20
