"""What a worker computes with: a runner, the paged cache it writes, and what follows from both."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.cache.hashing import root_hash
from kvferry.cache.paged import PagedKV
from kvferry.core.ids import BlockHash
from kvferry.engine.in_flight import Launcher
from kvferry.engine.plan import Runner
from kvferry.engine.rank_group import RankGroup
from kvferry.engine.rank_messages import Order


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What workers must agree on for the KV of one to mean anything to another."""

    hash_scheme: int
    """Version of the block hash chain."""
    weights: bytes
    """Digest of weights and configuration."""
    tokenizer: bytes
    dtype: str
    """Element type of the computation."""

    def root(self, kv_flavour: str) -> BlockHash:
        """Root of the block hash chain of a cache: see ``core.dtypes.kv_flavour``."""
        return root_hash(self.hash_scheme, self.weights, "", self.dtype, kv_flavour)


@dataclass(frozen=True, slots=True)
class Backend:
    """Everything a role needs to know of the model and its cache."""

    runner: Runner
    kv: PagedKV
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    identity: ModelIdentity
    vocab_size: int = 2**31 - 1
    """Token ids that the model knows are below it."""
    launcher: Launcher | None = None
    """The runner again, where its steps run on a device behind the host."""
    num_kv_heads: int | None = None
    """Of the whole model, where ``kv`` holds one rank's."""
    group: RankGroup | None = None
    """The other ranks, where there are any: ``kv`` is rank 0's part."""
    rank_endpoints: tuple[tuple[str, ...], ...] = ()
    """Where the ranks from 1 on receive KV."""

    @property
    def tp(self) -> int:
        return self.group.size if self.group is not None else 1

    def order(self, payload: bytes) -> None:
        """To the KV planes of the other ranks. Raises RankLost."""
        if self.group is not None:
            self.group.send(Order(payload))
