"""How a link begins: both sides prove that they know the shared secret and agree on a digest, then
the data path is opened. What is proved covers every field: nobody on the way can change one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.core.ids import Incarnation
from kvferry.kv_transfer.frames import decode_to_receiver, decode_to_sender, encode
from kvferry.kv_transfer.messages import (
    MAX_HANDSHAKE_FRAME,
    MAX_LINK_BYTES,
    MAX_TEXT,
    PROTOCOL,
    Challenge,
    Message,
    Proof,
    Refused,
    Welcome,
)
from kvferry.kv_transfer.transport import Channel, Inlet, Outlet


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """What sender and receiver of one process share. Times in seconds."""

    secret: bytes
    incarnation: Incarnation
    progress_timeout_s: float = 5.0
    """A transfer that does not move for so long is sent once more, then fails."""
    beat_s: float = 1.0
    silence_s: float = 5.0
    """A peer silent for so long is lost; also the longest wait to send, connect or be greeted."""
    slab_bytes: int = 8 << 20
    staging_bytes: int = 128 << 20
    """Slab memory of a receiver, all links together."""
    expected_links: int = 8
    """Links among which a receiver's slab memory is to be shared out."""
    spare_slabs: int = 4
    """Slabs of a link, half of them at most, that its sender may hold for whatever it has next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeted:
    """The sender's end of a link ready for slabs."""

    outlet: Outlet
    num_slabs: int
    slab_bytes: int
    digest: str
    """Scheme of the slabs' digests."""
    peer: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The receiver's end of a link ready for slabs."""

    inlet: Inlet
    num_slabs: int
    slab_bytes: int
    digest: str
    """Scheme of the slabs' digests."""
    peer: Incarnation
    rank: int
    """The peer's."""


def _mac(secret: bytes, side: bytes, before: bytes, message: Proof | Welcome) -> bytes:
    """Of a whole message but for its ``mac``, after what was said ``before``."""
    # The side is part of it, so that a proof cannot be played back to whoever asked for it.
    body = encode(msgspec.structs.replace(message, mac=bytes(32)))
    return hmac.digest(secret, b"kvferry KV link\0" + side + b"\0" + before + body, hashlib.sha256)


def introduce(
    channel: Channel,
    options: LinkOptions,
    rank: int,
    digests: Sequence[str],
    *,
    is_probe: bool = False,
    is_closing: Callable[[], bool] = lambda: False,
) -> Greeted:
    """The sender's side. ``digests``: schemes that it can compute, best first.

    ``is_closing`` is asked at each wake: whether to wait no longer. Raises LinkRefused,
    LinkLost, ProtocolError.
    """
    deadline = time.monotonic() + options.silence_s
    challenge = decode_to_sender(_next_frame(channel, deadline, is_closing))
    if not isinstance(challenge, Challenge) or challenge.protocol != PROTOCOL:
        raise LinkRefused(f"the peer does not speak version {PROTOCOL} of the KV link")
    proof = Proof(
        nonce=secrets.token_bytes(32),
        mac=bytes(32),
        incarnation=options.incarnation,
        rank=rank,
        digests=list(digests),
        is_probe=is_probe,
    )
    mac = _mac(options.secret, b"sender", challenge.nonce, proof)
    _send(channel, msgspec.structs.replace(proof, mac=mac), deadline)
    welcome = decode_to_sender(_next_frame(channel, deadline, is_closing))
    if isinstance(welcome, Refused):
        raise LinkRefused(f"the peer refuses the link: {welcome.detail}")
    if not isinstance(welcome, Welcome):
        raise ProtocolError("expected a welcome")
    # The proof's own MAC stands for the challenge and all that was proved.
    expected = _mac(options.secret, b"receiver", mac, welcome)
    if not hmac.compare_digest(expected, welcome.mac):
        raise LinkRefused("the peer does not know the secret")
    if welcome.digest not in digests:
        raise ProtocolError(f"the peer chose the digest {welcome.digest!r}, which was not on offer")
    if welcome.num_slabs * welcome.slab_bytes > MAX_LINK_BYTES:
        raise ProtocolError(f"{welcome.num_slabs} slabs of {welcome.slab_bytes} bytes for one link")
    left_s = max(0.0, deadline - time.monotonic())
    return Greeted(
        outlet=channel.open_outlet(welcome.num_slabs, welcome.slab_bytes, left_s),
        num_slabs=welcome.num_slabs,
        slab_bytes=welcome.slab_bytes,
        digest=welcome.digest,
        peer=Incarnation(welcome.incarnation),
    )


def challenge(
    channel: Channel, options: LinkOptions, is_closing: Callable[[], bool] = lambda: False
) -> Proof:
    """The receiver's first half: the sender's proof, checked.

    ``is_closing`` is asked at each wake: whether to wait no longer. Raises LinkRefused, having told
    the peer, when it does not know the secret; LinkLost, ProtocolError.
    """
    deadline = time.monotonic() + options.silence_s
    nonce = secrets.token_bytes(32)
    _send(channel, Challenge(protocol=PROTOCOL, nonce=nonce), deadline)
    proof = decode_to_receiver(_next_frame(channel, deadline, is_closing))
    if not isinstance(proof, Proof):
        raise ProtocolError("expected a proof")
    expected = _mac(options.secret, b"sender", nonce, proof)
    if not hmac.compare_digest(expected, proof.mac):
        refuse(channel, options, "the secret is wrong")
    return proof


def agree(channel: Channel, options: LinkOptions, proof: Proof, digests: Sequence[str]) -> str:
    """The first of the receiver's digest schemes, best first, that the sender has too.

    Raises LinkRefused, having told the peer, when there is none; LinkLost.
    """
    for digest in digests:
        if digest in proof.digests:
            return digest
    return refuse(channel, options, f"no digest in common; known here: {', '.join(digests)}")


def welcome(
    channel: Channel, options: LinkOptions, proof: Proof, digest: str, num_slabs: int
) -> Admitted:
    """The receiver's second half. Raises LinkLost, ProtocolError."""
    deadline = time.monotonic() + options.silence_s
    message = Welcome(
        mac=bytes(32),
        incarnation=options.incarnation,
        slab_bytes=options.slab_bytes,
        num_slabs=num_slabs,
        digest=digest,
    )
    mac = _mac(options.secret, b"receiver", proof.mac, message)
    _send(channel, msgspec.structs.replace(message, mac=mac), deadline)
    left_s = max(0.0, deadline - time.monotonic())
    return Admitted(
        inlet=channel.open_inlet(num_slabs, options.slab_bytes, left_s),
        num_slabs=num_slabs,
        slab_bytes=options.slab_bytes,
        digest=digest,
        peer=Incarnation(proof.incarnation),
        rank=proof.rank,
    )


def refuse(channel: Channel, options: LinkOptions, detail: str) -> NoReturn:
    """Tell the peer why there will be no link. Raises LinkRefused, always."""
    channel.send(encode(Refused(detail=detail[:MAX_TEXT])), options.silence_s)
    raise LinkRefused(detail)


def _send(channel: Channel, message: Message, deadline: float) -> None:
    channel.send(encode(message), max(0.0, deadline - time.monotonic()))


def _next_frame(
    channel: Channel, deadline: float, is_closing: Callable[[], bool] = lambda: False
) -> bytes:
    """A frame of the handshake. Raises LinkLost at the deadline, or when this side closes."""
    while (left_s := deadline - time.monotonic()) > 0 and not is_closing():
        frame = channel.receive(left_s, MAX_HANDSHAKE_FRAME)
        if frame is not None:
            return frame
    raise LinkLost("the peer does not answer")
