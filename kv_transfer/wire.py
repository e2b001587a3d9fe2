"""Between the engine's words for KV - pools, blocks, session messages - and the KV plane's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvferry.cache.block_pool import BlockPool
from kvferry.cache.hashing import chain_hashes
from kvferry.cache.paged import PagedKV
from kvferry.core.config import Config
from kvferry.core.errors import ConfigError, ProtocolError, StartupError
from kvferry.core.ids import AttemptKey, BlockHash, BlockId, Incarnation, LeaseId
from kvferry.core.span import Span
from kvferry.kv_transfer.choices import Choices
from kvferry.kv_transfer.endpoints import (
    TRANSPORTS,
    ListenOptions,
    Medium,
    Transport,
    listen,
)
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.jobs import (
    Account,
    BlockTable,
    ReceiveClosed,
    ReceiveDone,
    ReceiveEvent,
    ReceiveFailed,
    SendAborted,
    SendDone,
    SendEvent,
    SendFailed,
    SendJob,
)
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.transport import Listener
from kvferry.proto import worker_pb2 as pb


def layout_message(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
        tp=layout.tp,
        pp=layout.pp,
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
            tp=message.tp,
            pp=message.pp,
        )
    except ValueError as error:
        raise ProtocolError(str(error)) from None


def endpoint_messages(ranks: Sequence[Sequence[str]]) -> list[pb.KvEndpoint]:
    """``ranks[r]``: where rank r receives, one endpoint per transport."""
    return [
        pb.KvEndpoint(rank=rank, endpoint=endpoint)
        for rank, endpoints in enumerate(ranks)
        for endpoint in endpoints
    ]


def endpoints_of(messages: Iterable[pb.KvEndpoint], rank: int) -> tuple[str, ...]:
    """Where one rank receives."""
    return tuple(message.endpoint for message in messages if message.rank == rank)


def account_message(account: Account) -> pb.Account:
    return pb.Account(
        transport=account.transport,
        nbytes=account.nbytes,
        busy_s=account.busy_s,
        wire_s=account.wire_s,
        credit_s=account.credit_s,
        wall_s=account.wall_s,
        exposed_s=account.exposed_s,
        resends=account.resends,
    )


def ending_of(event: SendEvent | ReceiveEvent) -> str:
    """How a transfer or a lease ended, as it is counted."""
    match event:
        case SendFailed() | ReceiveFailed():
            return f"failed: {event.reason}"
        case SendDone() | ReceiveDone():
            return "complete"
        case SendAborted():
            return "aborted"
        case ReceiveClosed():
            return "released"


def failure_text(event: SendEvent | ReceiveEvent) -> str:
    """Why it did not deliver, for the router."""
    match event:
        case SendFailed(detail=detail) | ReceiveFailed(detail=detail) if detail:
            return f"{event.reason}: {detail}"
        case SendFailed() | ReceiveFailed():
            return str(event.reason)
    return "it was given up here"


def send_jobs(
    key: AttemptKey, target: pb.Target, token_ids: Sequence[int], blocks: BlockTable
) -> list[SendJob]:
    """The KV that a target lacks of a prompt, to each of its ranks.

    Raises ProtocolError for a layout that cannot be.
    """
    layout = layout_from_message(target.layout)
    root = BlockHash(target.root_hash)
    full = chain_hashes(root, token_ids, layout.block_size)
    return [
        SendJob(
            key=key,
            peer=Incarnation(target.peer),
            endpoints=endpoints_of(target.endpoints, rank),
            lease=LeaseId(target.lease),
            target=layout,
            target_rank=rank,
            wire=target.wire,
            tokens=Span(target.cached_tokens, len(token_ids)),
            blocks=blocks,
            chain_hash=full[-1] if full else root,
        )
        for rank in range(layout.num_ranks)
    ]


def block_table(pool: BlockPool, blocks: Sequence[BlockId]) -> BlockTable:
    """The blocks of a sequence with the generations they have now."""
    block_ids = np.asarray(blocks, np.int32)
    return BlockTable(block_ids=block_ids, generations=pool.generations[block_ids])


def layout_of(kv: PagedKV, num_kv_heads: int | None = None, tp: int = 1) -> KvLayout:
    """The layout of the paged cache of a worker, of which ``kv`` is one of ``tp`` ranks' part and
    ``num_kv_heads`` are all its heads; default: those of ``kv``.
    """
    return KvLayout(
        num_layers=kv.num_layers,
        num_kv_heads=num_kv_heads or kv.num_kv_heads,
        head_dim=kv.head_dim,
        block_size=kv.block_size,
        dtype=str(kv.dtype).removeprefix("torch."),
        tp=tp,
    )


def listeners(config: Config, host: str) -> list[Listener]:
    """Where a decode worker takes links: one per transport that this process can use, or the one
    that the configuration forces. The caller owns them.

    Raises ConfigError for a forced transport that cannot be used here, StartupError for a host that
    cannot be listened on.
    """
    wanted = config.transfer.transport
    options = ListenOptions(host=host, streams=config.transfer.streams)
    if wanted != "auto":
        reason = TRANSPORTS[wanted].why_not() if wanted in TRANSPORTS else "it is not in this build"
        if reason is not None:
            raise ConfigError("transfer.transport", f"{wanted} cannot be used here: {reason}")
        return _listen([wanted], options)
    names = [
        transport.name
        for transport in _transports(config).values()
        if transport.name != "loopback"
        and (transport.authenticates or config.transfer.trusted_network)
        and transport.why_not() is None
    ]
    return _listen(names, options)


def _listen(names: Iterable[str], options: ListenOptions) -> list[Listener]:
    found: list[Listener] = []
    try:
        for name in names:
            found.append(listen(name, options))
    except OSError as error:
        for listener in found:
            listener.close()
        reason = error.strerror or error
        raise StartupError(f"decode.host: cannot listen on {options.host}: {reason}") from None
    return found


def link_choices(config: Config) -> Choices:
    """Among which a prefill worker chooses. Raises ConfigError for a forced transport that cannot
    be used here.
    """
    transfer = config.transfer
    forced = None if transfer.transport == "auto" else transfer.transport
    choices = Choices(forced, transfer.trusted_network, _transports(config))
    choices.check()
    return choices


def _transports(config: Config) -> dict[str, Transport]:
    """Those that this worker's caches can use: a host may have GPUs that it does not compute on."""
    on_device = config.cluster.device != "cpu"
    return {
        name: transport
        for name, transport in TRANSPORTS.items()
        if on_device or transport.medium is not Medium.DEVICE
    }


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
        expected_links=max(1, config.prefill.workers * config.prefill.tp),
    )
