"""Who takes part in a sweep: our transports that can be used here, and the peers at hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kvferry.bench.transfer_pair import Pair, Setting
from kvferry.bench.transfer_peers import peer_command, peer_program
from kvferry.bench.transfer_sweep import MANY_AT_ONCE, Contender
from kvferry.core.errors import ConfigError
from kvferry.kv_transfer.endpoints import TRANSPORTS, Medium
from kvferry.kv_transfer.transports.nixl_agent import why_not as nixl_is_missing

NIXL, NIXL_TCP, MOONCAKE = "NIXL", "NIXL over TCP", "Mooncake over TCP"


class Peer(NamedTuple):
    """A program, not started yet."""

    name: str
    command: list[str]
    environment: Mapping[str, str]


def usable_transports(options: argparse.Namespace) -> list[str]:
    """Those asked for. Raises ConfigError for one that cannot be used here."""
    usable = [
        name
        for name, transport in TRANSPORTS.items()
        if transport.medium is not Medium.DEVICE and transport.why_not() is None
    ]
    wanted: list[str] = usable if options.transports is None else options.transports.split(",")
    for name in wanted:
        if name not in usable:
            raise ConfigError("--transports", f"{name!r} is none of {', '.join(usable)}")
    return wanted


def peers_at_hand(options: argparse.Namespace) -> list[Peer]:
    """NIXL is at hand where the extra ``rdma`` is installed."""
    nixl = options.peer_nixl
    if nixl is None and nixl_is_missing() is None and not options.quick:
        nixl = sys.executable
    peers = []
    if nixl is not None:
        command = peer_command(nixl, "nixl")
        peers += [Peer(NIXL, command, {}), Peer(NIXL_TCP, command, {"UCX_TLS": "tcp,self"})]
    if options.peer_mooncake is not None:
        peers.append(Peer(MOONCAKE, peer_command(options.peer_mooncake, "mooncake"), {}))
    return peers


def start_contenders(
    stack: ExitStack,
    pair: Pair,
    setting: Setting,
    transports: Sequence[str],
    peers: Sequence[Peer],
) -> list[Contender]:
    """Open our caches and links, and start the peers, which hold only what is walked: each has two
    caches of its own in memory, beside ours. Raises StartupError.
    """
    pair.open(setting, transports)
    contenders = [
        Contender(
            name,
            partial(pair.transfer, name),
            many=partial(pair.transfer, name, window=MANY_AT_ONCE),
            is_network=name in ("tcp", "gloo"),
        )
        for name in transports
    ]
    theirs = replace(setting, tokens=setting.walked)
    for wanted in peers:
        peer = stack.enter_context(peer_program(wanted.command, theirs, wanted.environment))
        contenders.append(
            Contender(
                wanted.name,
                peer.transfer,
                way=peer.way,
                is_network=wanted.name != NIXL,
                most_bytes=theirs.nbytes(theirs.tokens),
            )
        )
    return contenders
