"""A sender's session on a virtual clock, with a data path that lands slabs when the test says."""

from __future__ import annotations

from typing import Any

from lease_table import BLOCKS, LAYOUT, PEER, TOKENS, Clock, key
from receiver_bench import OPTIONS, FakeChannel
from unfollowed import Unfollowed

from kvferry.core.errors import LinkLost
from kvferry.core.ids import LeaseId
from kvferry.kv_transfer.frames import all_to_receiver, encode
from kvferry.kv_transfer.handshake import Greeted
from kvferry.kv_transfer.jobs import Reason, SendEvent, SendJob
from kvferry.kv_transfer.memory import Form
from kvferry.kv_transfer.messages import Ack, Beat, Credit, Header, Message, Offer
from kvferry.kv_transfer.outgoing import Owed, Progress, Transfer, TransferTable
from kvferry.kv_transfer.plan import SlabMove
from kvferry.kv_transfer.sender_session import SenderSession

SLAB_BYTES = LAYOUT.token_bytes * 2
NUM_SLABS = 3
OWED = Owed((LAYOUT.whole,), LAYOUT.head_bytes, 0.0, num_ranks=2)


class FakeOutlet:
    """What is pushed stays in flight until the test lands it, unless ``lands``."""

    is_device = False

    def __init__(self, is_pulled: bool, lands: bool) -> None:
        self.is_pulled = is_pulled
        self.lands = lands
        self.is_broken = False
        self.pushed: list[tuple[int, int, int]] = []
        self.flying: set[int] = set()
        self.closed = False
        self.words: list[memoryview] | None = None
        """Of progress, where slabs are shared."""
        self._slabs = [memoryview(bytearray(SLAB_BYTES)) for _ in range(NUM_SLABS)]

    def slab(self, index: int) -> memoryview:
        assert index not in self.flying, "filled in flight"
        return self._slabs[index]

    def push(self, slab: int, grant: int, nbytes: int) -> None:
        assert slab not in self.flying
        self.pushed.append((slab, grant, nbytes))
        if not self.lands:
            self.flying.add(slab)

    @property
    def is_followed(self) -> bool:
        return self.words is not None

    def progress(self, slab: int, grant: int, nbytes: int) -> memoryview | None:
        return self.words and self.words[slab]

    def in_flight(self, slab: int) -> bool:
        if self.is_broken:
            raise LinkLost("the data path broke")
        return slab in self.flying

    def close(self) -> None:
        self.closed = True


class FakeMemory(Unfollowed):
    """Its packs take a second each and digest to the number of the slab."""

    layout = LAYOUT
    rank = 0
    digests = ("xxh3",)

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.packed: list[tuple[SlabMove, Form, object]] = []
        self.stale_after: int | None = None
        """Packs until a block is given away."""
        self.in_pack: Any = lambda: None
        """Runs while a pack does."""
        self.followed_bytes: int | None = None

    def followed_from(self, *_: object) -> int | None:
        return self.followed_bytes

    def is_fresh(self, *_: object) -> bool:
        return self.stale_after is None or len(self.packed) < self.stale_after

    def pack(
        self,
        blocks: object,
        move: SlabMove,
        form: Form,
        slab: memoryview,
        after: object = None,
        progress: object = None,
    ) -> list[int]:
        assert len(slab) == move.nbytes
        self._clock.now += 1.0
        self.packed.append((move, form, after))
        self.in_pack()
        return [move.index]

    def scatter(self, *_: object) -> list[int]:
        raise AssertionError("a sender does not scatter")


class Bench:
    """One session. Each of its calls returns what the session said."""

    def __init__(self, *, is_pulled: bool = False, lands: bool = True) -> None:
        self.clock = Clock()
        self.events: list[SendEvent] = []
        self.succeeded: list[Transfer] = []
        self.table = TransferTable(
            self.events.append, self.clock, OPTIONS.progress_timeout_s, self.succeeded.append
        )
        self.memory = FakeMemory(self.clock)
        self.outlet = FakeOutlet(is_pulled, lands)
        self.transfers: dict[int, Transfer] = {}
        self.inbox: list[Transfer] = []
        self.open()

    def open(self) -> None:
        """A new link, to which the transfers move."""
        self.channel = FakeChannel(all_to_receiver)
        self.outlet = FakeOutlet(self.outlet.is_pulled, self.outlet.lands)
        greeted = Greeted(
            outlet=self.outlet,
            num_slabs=NUM_SLABS,
            slab_bytes=SLAB_BYTES,
            digest="xxh3",
            peer=PEER,
        )
        self.session = SenderSession(
            self.channel, greeted, self, self.memory, self.table, OPTIONS, self.clock
        )

    def admit(self) -> list[Transfer]:
        admitted, self.inbox = self.inbox, []
        for transfer in admitted:
            self.transfers[transfer.job.lease] = transfer
        return admitted

    def begin(self, attempt: int = 1, lease: int = 1, owed: Owed = OWED) -> Transfer:
        job = SendJob(
            key=key(attempt),
            peer=PEER,
            endpoints=("fake:x",),
            lease=LeaseId(lease),
            target=LAYOUT,
            wire="float32",
            tokens=TOKENS,
            blocks=BLOCKS,
            chain_hash=b"h",
        )
        transfer = self.table.add(job, owed)
        self.inbox.append(transfer)
        return transfer

    def computed(
        self, transfer: Transfer, layers_end: int = 2, tokens_end: int = TOKENS.end
    ) -> list[Message]:
        transfer.report(Progress(layers_end, tokens_end, (layers_end, tokens_end)), self.clock.now)
        return self.turn()

    def send(self, attempt: int = 1, lease: int = 1) -> Transfer:
        """A transfer of four slabs, offered."""
        transfer = self.begin(attempt, lease)
        (offer,) = self.computed(transfer)
        assert isinstance(offer, Offer)
        assert offer.slabs == len(transfer.slabs) == 4
        return transfer

    def turn(self) -> list[Message]:
        """Until nothing is due at once."""
        while self.session.turn() == 0.0:
            pass
        return self.said()

    def hear(self, message: Message) -> list[Message]:
        self.session.handle(encode(message))
        return self.turn()

    def credit(self, grant: int, lease: int = 1) -> list[Message]:
        """Of slab memory that goes round."""
        return self.hear(Credit(lease=lease, slab=grant % NUM_SLABS, grant=grant))

    def ack(self, header: Message, lease: int = 1) -> list[Message]:
        assert isinstance(header, Header)
        return self.hear(Ack(lease=lease, index=header.header.index, grant=header.grant))

    def land(self, *slabs: int) -> list[Message]:
        self.outlet.flying -= set(slabs)
        return self.turn()

    def said(self) -> list[Message]:
        said = [message for message in self.channel.sent if not isinstance(message, Beat)]
        self.channel.sent.clear()
        return said

    def failed(self) -> Reason:
        """Why the one transfer that ended did."""
        (event,) = self.events
        return event.reason
