"""The layout carries what the hello of a worker carries."""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.kv_transfer.layout import KvLayout
from kvferry.proto import worker_pb2

VALUES = {
    "num_layers": 30,
    "num_kv_heads": 3,
    "head_dim": 64,
    "block_size": 16,
    "dtype": "bfloat16",
}


def test_fields_are_those_of_the_wire() -> None:
    ours = [field.name for field in dataclasses.fields(KvLayout)]
    assert ours == [field.name for field in worker_pb2.KvLayout.DESCRIPTOR.fields]


def test_sizes() -> None:
    layout = KvLayout(**VALUES)
    assert layout.head_bytes == 128
    assert layout.layer_token_bytes == 2 * 3 * 64 * 2
    assert layout.token_bytes == 30 * layout.layer_token_bytes
    assert layout.block_bytes == 16 * layout.token_bytes


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        KvLayout(**(VALUES | {name: 0}))


def test_unknown_element_types_are_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        KvLayout(**(VALUES | {"dtype": "complex64"}))
