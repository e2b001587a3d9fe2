"""Block hashes are defined by content alone (fault B012)."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from kvferry.cache.hashing import block_hash, chain_hashes, root_hash
from kvferry.core.ids import BlockHash

ROOT = root_hash(1, b"weights", "adapter@1", "float32", "float32", b"salt")
PROGRAM = """
from kvferry.cache.hashing import chain_hashes, root_hash
root = root_hash(1, b"weights", "adapter@1", "float32", "float32", b"salt")
print(root.hex(), *(h.hex() for h in chain_hashes(root, list(range(48)), 16)))
"""


def test_values_are_pinned() -> None:
    """A change of these is a change of the scheme: it needs a new SCHEME_VERSION."""
    assert ROOT.hex() == "602a9fff2ffe7e724046bdf5d585d5f0"
    assert block_hash(ROOT, [1, 2, 3, -1]).hex() == "d857bc4a6619b008f21d0f3809af4d30"


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_equal_in_every_process(hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    here = [ROOT, *chain_hashes(ROOT, np.arange(48), 16)]
    assert run.stdout.split() == [each.hex() for each in here]


def test_a_chain_is_its_links_without_the_partial_tail() -> None:
    tokens = list(range(11))
    first = block_hash(ROOT, tokens[:4])
    second = block_hash(first, tokens[4:8])
    assert chain_hashes(ROOT, tokens, 4) == [first, second]
    assert chain_hashes(ROOT, tokens[:3], 4) == []
    assert chain_hashes(ROOT, [], 4) == []


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8", "<u2"])
def test_how_tokens_are_stored_does_not_matter(dtype: str) -> None:
    tokens = [5, 0, 300, 65535]
    assert block_hash(ROOT, np.array(tokens, dtype=dtype)) == block_hash(ROOT, tokens)
    strided = np.array([5, 9, 0, 9, 300, 9, 65535, 9], dtype=dtype)[::2]
    assert block_hash(ROOT, strided) == block_hash(ROOT, tuple(tokens))


def test_parents_tokens_and_order_matter() -> None:
    other = block_hash(ROOT, [7])
    variants = [
        block_hash(ROOT, [1, 2]),
        block_hash(ROOT, [2, 1]),
        block_hash(ROOT, [1, 2, 0]),
        block_hash(other, [1, 2]),
        block_hash(ROOT, [1]),
        block_hash(block_hash(ROOT, [1]), [2]),
    ]
    assert len(set(variants)) == len(variants)
    assert all(len(each) == 16 for each in variants)


def root(**changes: object) -> BlockHash:
    fields: dict[str, object] = {
        "scheme_version": 1,
        "weights_digest": b"w",
        "adapter": "a",
        "dtype": "float32",
        "kv_flavour": "int8",
        "tenant_salt": b"t",
    }
    return root_hash(**{**fields, **changes})  # type: ignore[arg-type]


def test_every_field_of_the_root_matters() -> None:
    """B010."""
    roots = [
        root(),
        root(scheme_version=2),
        root(weights_digest=b"w2"),
        root(adapter="a@2"),
        root(dtype="bfloat16"),
        root(kv_flavour="fp8"),
        root(tenant_salt=b""),
        # Bytes that move from one field to the next.
        root(weights_digest=b"wa", adapter=""),
        root(adapter="afloat32", dtype=""),
        root(adapter="", dtype="afloat32"),
        root(kv_flavour="int8t", tenant_salt=b""),
    ]
    assert len(set(roots)) == len(roots)
