"""Identity of KV blocks: a chain hash over content, equal in all processes and restarts.

``H(parent, token ids)`` from a root that binds everything else the KV depends on. Python's own
``hash`` is never used: it is seeded per process, and router and workers would silently never agree.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.core.ids import BlockHash

SCHEME_VERSION = 1
DIGEST_BYTES = 16

TokenIds = NDArray[np.integer[Any]] | Sequence[int]

_KEY = b"kvferry.block-chain"
_ROOT = b"root"
_BLOCK = b"block"
# Copied for every block: taking in the key and the parameters costs as much as hashing a block.
_BLOCK_STATE = blake2b(digest_size=DIGEST_BYTES, key=_KEY, person=_BLOCK)
_TOKEN = np.dtype("<i4")


def root_hash(
    scheme_version: int,
    weights_digest: bytes,
    adapter: str,
    dtype: str,
    kv_flavour: str,
    tenant_salt: bytes = b"",
) -> BlockHash:
    """Where a chain starts: equal only where KV of equal tokens is interchangeable.

    ``weights_digest`` covers weights and configuration, ``adapter`` names an adapter and its load
    generation, ``kv_flavour`` is the element type and scaling of the cache. Each field is tagged
    and length-prefixed, so that no two different lists of fields give the same bytes.
    """
    state = blake2b(digest_size=DIGEST_BYTES, key=_KEY, person=_ROOT)
    fields = {
        b"scheme": str(scheme_version).encode(),
        b"weights": weights_digest,
        b"adapter": adapter.encode(),
        b"dtype": dtype.encode(),
        b"flavour": kv_flavour.encode(),
        b"tenant": tenant_salt,
    }
    for tag, value in fields.items():
        state.update(struct.pack("<I", len(tag)) + tag + struct.pack("<Q", len(value)) + value)
    return BlockHash(state.digest())


def block_hash(parent: BlockHash, token_ids: TokenIds | memoryview) -> BlockHash:
    """Hash of the block that holds ``token_ids`` after the chain that ends in ``parent``. A
    memoryview is of their bytes: int32, little-endian.
    """
    if isinstance(token_ids, memoryview):
        return _link(parent, token_ids)
    return _link(parent, _token_bytes(token_ids))


def chain_hashes(root: BlockHash, tokens: TokenIds, block_size: int) -> list[BlockHash]:
    """Hashes of the full blocks of ``tokens``, first to last; a partial tail has no identity."""
    return list(iter_chain(root, tokens, block_size))


def iter_chain(root: BlockHash, tokens: TokenIds, block_size: int) -> Iterator[BlockHash]:
    """Like :func:`chain_hashes`, one at a time."""
    data = memoryview(_token_bytes(tokens))
    stride = block_size * 4
    parent = root
    for start in range(0, len(data) - stride + 1, stride):
        parent = _link(parent, data[start : start + stride])
        yield parent


def _token_bytes(tokens: TokenIds) -> bytes:
    if isinstance(tokens, np.ndarray) and tokens.dtype is _TOKEN:
        return tokens.tobytes()
    return np.asarray(tokens, dtype=_TOKEN).tobytes()


def _link(parent: BlockHash, data: bytes | memoryview) -> BlockHash:
    state = _BLOCK_STATE.copy()
    state.update(parent)
    state.update(data)
    return BlockHash(state.digest())
