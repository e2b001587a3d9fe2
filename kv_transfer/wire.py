"""Between the engine's words for KV - pools, blocks, session messages - and the KV plane's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.cache.block_pool import BlockPool
from kvferry.cache.paged import PagedKV
from kvferry.core.config import Config
from kvferry.core.errors import ProtocolError
from kvferry.core.ids import BlockId, Incarnation
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.layout import KvLayout
from kvferry.proto import worker_pb2 as pb


def layout_message(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
    )


def layout_from_message(message: pb.KvLayout) -> KvLayout:
    """Raises ProtocolError for a layout that cannot be."""
    try:
        return KvLayout(
            num_layers=message.num_layers,
            num_kv_heads=message.num_kv_heads,
            head_dim=message.head_dim,
            block_size=message.block_size,
            dtype=message.dtype,
        )
    except ValueError as error:
        raise ProtocolError(str(error)) from None


def block_table(pool: BlockPool, blocks: Sequence[BlockId]) -> BlockTable:
    """The blocks of a sequence with the generations they have now."""
    block_ids = np.asarray(blocks, np.int32)
    return BlockTable(block_ids=block_ids, generations=pool.generations[block_ids])


def layout_of(kv: PagedKV) -> KvLayout:
    """The layout of a paged cache."""
    return KvLayout(
        num_layers=kv.num_layers,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        block_size=kv.block_size,
        dtype=str(kv.dtype).removeprefix("torch."),
    )


def link_options(config: Config, secret: str, incarnation: Incarnation) -> LinkOptions:
    """What sender and receiver of one worker are told by the configuration."""
    return LinkOptions(
        secret=secret.encode(),
        incarnation=incarnation,
        progress_timeout_s=config.transfer.progress_timeout_s,
        beat_s=config.cluster.beat_s,
        silence_s=config.cluster.silence_s,
        slab_bytes=config.transfer.slab,
        staging_bytes=config.transfer.staging,
    )
