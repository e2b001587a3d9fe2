"""A receiver's link on a virtual clock, with a data path whose bytes arrive when the test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from lease_table import LAYOUT, MOVES, NBYTES, PEER, Clock, Leases, header, key

from kvferry.core.errors import LinkLost
from kvferry.core.ids import Incarnation
from kvferry.kernels.kv_pack.progress import Progress
from kvferry.kv_transfer.frames import all_to_sender, encode
from kvferry.kv_transfer.handshake import Admitted, LinkOptions
from kvferry.kv_transfer.memory import Form
from kvferry.kv_transfer.messages import Beat, Credit, Filling, Header, Message, Offer
from kvferry.kv_transfer.plan import SlabMove
from kvferry.kv_transfer.receiver_link import ReceiverLink
from kvferry.kv_transfer.receiver_probes import ProbeTurn

SLAB_BYTES = 4096
OPTIONS = LinkOptions(
    secret=b"s",
    incarnation=Incarnation(7),
    progress_timeout_s=5.0,
    beat_s=1.0,
    silence_s=5.0,
    slab_bytes=SLAB_BYTES,
    spare_slabs=0,
)


class FakeInlet:
    """Slabs of which nothing arrives by itself."""

    is_device = False

    def __init__(self, num_slabs: int, is_pulled: bool, arrives: bool) -> None:
        self.is_pulled = is_pulled
        self.arrives = arrives
        """Whether what is pushed, or pulled, is there at once."""
        self.is_broken = False
        self.granted: dict[int, int] = {}
        self.pulls: list[tuple[int, int, int]] = []
        self.here: set[tuple[int, int]] = set()
        """(slab, grant) whose bytes have come."""
        self.closed = False
        self.word: memoryview | None = None
        """Of progress, where slabs are shared."""
        self._slabs = [memoryview(bytearray(SLAB_BYTES)) for _ in range(num_slabs)]

    def slab(self, index: int) -> memoryview:
        return self._slabs[index]

    def grant(self, slab: int, grant: int) -> None:
        assert grant > self.granted.get(slab, 0)
        self.granted[slab] = grant

    def pull(self, slab: int, grant: int, nbytes: int) -> None:
        assert self.granted[slab] == grant
        self.pulls.append((slab, grant, nbytes))

    def progress(self, slab: int, grant: int, nbytes: int) -> memoryview | None:
        return self.word

    def arrived(self, slab: int, grant: int, nbytes: int) -> bool:
        if self.is_broken:
            raise LinkLost("the data path broke")
        assert self.granted[slab] == grant
        if self.is_pulled:
            assert (slab, grant, nbytes) in self.pulls
        return self.arrives or (slab, grant) in self.here

    def close(self) -> None:
        self.closed = True


class FakeChannel:
    """Keeps what is sent, decoded as the other side would."""

    transport = "fake"

    def __init__(self, decode: Callable[[bytes], Sequence[Message]]) -> None:
        self._decode = decode
        self.sent: deque[Message] = deque()
        self.num_frames = 0
        self.wakes = 0

    def send(self, frame: bytes, timeout_s: float) -> None:
        self.num_frames += 1
        self.sent.extend(self._decode(frame))

    def receive(self, timeout_s: float, limit: int = 0) -> bytes | None:
        raise AssertionError("a link that is driven does not receive")

    def wake(self) -> None:
        self.wakes += 1

    def close(self) -> None: ...

    def open_inlet(self, *_: object) -> Any: ...

    def open_outlet(self, *_: object) -> Any: ...


class FakeMemory:
    """Digests are what the test says."""

    layout = LAYOUT
    rank = 0
    digests = ("xxh3",)

    def __init__(self) -> None:
        self.found = [0]
        self.moves: list[SlabMove] = []
        self.is_stale = False
        self.followed: list[int] | None = None
        """What a scatter finds that follows a pack; None: the pack does not go on."""
        self.in_follow: Callable[[], None] = lambda: None
        self.follows: list[tuple[SlabMove, Progress]] = []

    @property
    def scattered(self) -> list[int]:
        """Indices of the slabs that were written, in order."""
        return [move.index for move in self.moves]

    def is_fresh(self, *_: object) -> bool:
        return not self.is_stale

    def pack(self, *_: object) -> list[int]:
        raise AssertionError("a receiver does not pack")

    def scatter(self, blocks: object, move: SlabMove, *_: object) -> list[int]:
        self.moves.append(move)
        return self.found

    def followed_from(self, *_: object) -> int:
        raise AssertionError("a receiver follows what it is told of")

    def follow(
        self, blocks: object, move: SlabMove, form: Form, slab: memoryview, progress: Progress
    ) -> list[int] | None:
        assert len(slab) == move.nbytes
        self.follows.append((move, progress))
        self.in_follow()
        return self.followed


class Bench:
    """One link, and what it said; several may share ``leases`` and ``probes``."""

    def __init__(
        self,
        leases: Leases | None = None,
        *,
        num_slabs: int = 6,
        is_pulled: bool = False,
        arrives: bool = True,
        rank: int = 0,
        probes: ProbeTurn | None = None,
        spare_slabs: int = 0,
    ) -> None:
        if leases is None:
            leases = Leases()
            leases.expect()
        self.leases = leases
        self.clock: Clock = leases.clock
        self.channel = FakeChannel(all_to_sender)
        self.inlet = FakeInlet(num_slabs, is_pulled, arrives)
        self.memory = FakeMemory()
        admitted = Admitted(
            inlet=self.inlet,
            num_slabs=num_slabs,
            slab_bytes=SLAB_BYTES,
            digest="xxh3",
            peer=PEER,
            rank=rank,
        )
        self.link = ReceiverLink(
            self.channel,
            admitted,
            self.memory,
            leases.table,
            replace(OPTIONS, spare_slabs=spare_slabs),
            probes or ProbeTurn(self.clock),
            self.clock,
        )

    def hear(self, message: Message) -> list[Message]:
        """A message comes in; what is said to it, beats aside."""
        self.link.handle(encode(message))
        return self.turn()

    def turn(self) -> list[Message]:
        self.link.turn()
        said = [message for message in self.channel.sent if not isinstance(message, Beat)]
        self.channel.sent.clear()
        return said

    def offer(self, slabs: int = 1, nbytes: int = NBYTES, ranks: int = 1) -> list[Credit]:
        said = self.hear(Offer(key=key(), lease=1, slabs=slabs, nbytes=nbytes, ranks=ranks))
        assert all(isinstance(message, Credit) for message in said), said
        return said  # type: ignore[return-value]

    def filling(self, credit: Credit, index: int, **changes: Any) -> list[Message]:
        """Say that a granted slab is being filled."""
        return self.hear(self._filling(credit, index, changes))

    def sealed(self, credit: Credit, index: int, **changes: Any) -> list[Message]:
        """The same of a slab that will be sealed."""
        filling = self._filling(credit, index, changes)
        return self.hear(msgspec.structs.replace(filling, is_sealed=True))

    def _filling(self, credit: Credit, index: int, changes: dict[str, Any]) -> Filling:
        slab = header(MOVES[index], **({"digests": []} | changes))
        return Filling(slab=credit.slab, grant=credit.grant, header=slab)

    def fill(self, credit: Credit, index: int, **changes: Any) -> list[Message]:
        """Say that a granted slab is filled."""
        slab = header(MOVES[index], **changes)
        return self.hear(Header(slab=credit.slab, grant=credit.grant, header=slab))
