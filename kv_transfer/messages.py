"""The messages of a link's control channel: msgpack, one tagged struct per frame or
several, and a checksum.

    receiver                          sender
      Challenge         ->
                        <-            Proof            the sender knows the secret
      Welcome | Refused ->                             so does the receiver; memory changes hands
                        <-            Offer            slabs stand ready for a lease
      Credit            ->                             one slab of memory, granted once
      Spare             ->                             the same, ahead of an offer
                        <-            Filling          the slab is being filled; what will be in it
                        <-            Header           the slab is filled; what is in it
      Pull              ->                             push it now (pulled data paths alone)
      Ack | Resend      ->                             verified; or damaged: fill it again
      Missing           ->                             headers that must have been lost, or were
                                                       left out and are needed
                        <-            Return           a credit that will not be used
      Complete          ->                             the lease offered for has everything already
      Abort             <->                            the transfer is over
      Beat              <->                            each second
                        <-            Measure, Sample  a probe: as Offer and Header, of no lease

A ``grant`` is a number unique on its link: a slab's memory is given, used once and taken back under
it, so that a late message about an earlier use of the same memory is known as such. Ack and Resend
end a grant; after a Resend a new Credit comes unasked, for the damaged slab first of all. A Spare
saves the next lease the wait for its Credit: the sender fills it for whichever has a slab ready,
and offers only what has no memory then.

The headers of a rank's part leave in the order of their indices, but for those sent again.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.core.ids import AttemptKey
from kvferry.core.span import Span
from kvferry.kv_transfer.jobs import Reason
from kvferry.kv_transfer.plan import SlabMove

PROTOCOL = 5
MAX_FRAME = 1 << 20
"""Bytes of a frame at most."""
MAX_HANDSHAKE_FRAME = 1024
"""The same before the peer has proved that it knows the secret."""
MAX_LINK_BYTES = 4 << 30
"""Slab memory of a link at most: what a receiver may have a sender set aside."""
MAX_TILES = 65_536
MAX_TEXT = 200
MAX_MESSAGES = 64
"""In one frame."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Hash = Annotated[bytes, msgspec.Meta(max_length=64)]
Digests = Annotated[list[Text], msgspec.Meta(min_length=1, max_length=8)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=str.lower):
    """Base of all messages; the tag is the class's name in lower case."""


class Challenge(Message, frozen=True):
    protocol: Count
    nonce: Nonce


class Proof(Message, frozen=True):
    nonce: Nonce
    mac: Nonce
    incarnation: Count
    rank: Count
    digests: Digests
    """Schemes that the sender can compute."""
    is_probe: bool = False
    """The link is to be measured: it takes the place of no other link and no other's memory."""


class Welcome(Message, frozen=True):
    mac: Nonce
    incarnation: Count
    slab_bytes: Annotated[int, msgspec.Meta(gt=0)]
    num_slabs: Annotated[int, msgspec.Meta(gt=0, le=1024)]
    digest: Text
    """The scheme of this link."""


class Refused(Message, frozen=True):
    detail: Text


class Offer(Message, frozen=True):
    """Sent at the start, and again when more stands ready: the last one counts."""

    key: AttemptKey
    lease: Count
    slabs: Count
    """Those that stand ready and have no memory yet."""
    nbytes: Count
    """The whole part that this rank sends, ready or not."""
    ranks: Annotated[int, msgspec.Meta(ge=1)] = 1
    """How many of the sender's ranks have a part of this lease: together they make it whole."""


class Credit(Message, frozen=True):
    lease: Count
    slab: Count
    grant: Count


class Spare(Message, frozen=True):
    """A Credit for whichever lease has a slab ready next."""

    slab: Count
    grant: Count


class SlabHeader(Message, frozen=True):
    """What a slab holds: all of it is checked against the lease before a byte is written."""

    key: AttemptKey
    lease: Count
    index: Count
    """Counts the slabs of this rank's part from 0."""
    layers: Span
    heads: Span
    tokens: Span
    wire: Text
    """Element type."""
    chain_hash: Hash
    nbytes: Count
    digests: Annotated[list[int], msgspec.Meta(max_length=MAX_TILES)]

    @property
    def move(self) -> SlabMove:
        return SlabMove(self.index, self.layers, self.heads, self.tokens, self.nbytes)


class Header(Message, frozen=True):
    slab: Count
    grant: Count
    header: SlabHeader


class Filling(Message, frozen=True):
    """A slab in memory that both sides share is being filled: whoever likes may scatter it
    meanwhile. Nothing is owed to it; what counts is the Header that follows, or the seal.
    """

    slab: Count
    grant: Count
    header: SlabHeader
    """Without digests."""
    is_sealed: bool = False
    """The digests will stand in the shared memory too, and be sealed there once the slab holds: a
    Header comes only where this one is said to be Missing.
    """


class Ack(Message, frozen=True):
    lease: Count
    index: Count
    grant: Count


class Resend(Message, frozen=True):
    """The slab came damaged."""

    lease: Count
    index: Count
    grant: Count


class Pull(Message, frozen=True):
    slab: Count
    grant: Count


class Missing(Message, frozen=True):
    """Headers [begin, end) of a lease did not come, though later ones did, or are needed though
    their slabs are sealed.
    """

    lease: Count
    begin: Count
    end: Count


class Measure(Message, frozen=True):
    """Grant this many slabs to no lease, one by one."""

    slabs: Annotated[int, msgspec.Meta(gt=0, le=4096)]


class Sample(Message, frozen=True):
    """A slab of a probe is filled. Verified, and answered by Ack of lease 0, or Resend."""

    slab: Count
    grant: Count
    index: Count
    nbytes: Count
    digest: Count
    """xxh3-64 of its bytes; 0: not verified."""


class Return(Message, frozen=True):
    slab: Count
    grant: Count


class Complete(Message, frozen=True):
    key: AttemptKey
    lease: Count


class Abort(Message, frozen=True):
    key: AttemptKey
    lease: Count
    reason: Reason
    detail: Text = ""


class Beat(Message, frozen=True):
    pass


ToSender = (
    Challenge
    | Welcome
    | Refused
    | Credit
    | Spare
    | Pull
    | Ack
    | Resend
    | Missing
    | Complete
    | Abort
    | Beat
)
ToReceiver = Proof | Offer | Filling | Header | Return | Abort | Beat | Measure | Sample
PROBE_LEASE = 0
"""No lease of a worker has this id: leases count from 1."""
