"""The whole configuration: one frozen tree, read from one YAML file, checked before any start.

Unknown keys are refused with a suggestion. Values that follow from others are properties, never
written back. docs/configuration.md is made from the descriptions here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from kvferry.core.config_keys import Section, refuse_unknown_keys, set_dotted
from kvferry.core.dtypes import ELEMENT_BYTES, QUANTISED_BYTES, Dtype, KvDtype
from kvferry.core.errors import ConfigError
from kvferry.core.units import parse_address, parse_bytes


def _checked_address(text: str) -> str:
    parse_address(text)
    return text


TransportChoice = Literal["auto", "loopback", "shm", "tcp", "gloo", "nccl", "cuda_ipc", "nixl"]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
HostBytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Address = Annotated[str, AfterValidator(_checked_address)]

UNAUTHENTICATED = ("gloo", "nccl", "nixl")
ON_DEVICE = ("nccl", "cuda_ipc")
ON_ONE_HOST = ("shm", "cuda_ipc")
NODE_HOST = "node"
CPU_KV_NBYTES = parse_bytes("512MiB")
EMBEDDED_MODEL = "smollm2-135m-instruct"


class ModelConfig(Section):
    """Which model is served, and in which numbers."""

    path: str = Field(
        EMBEDDED_MODEL,
        min_length=1,
        description="Hugging Face folder, hub id, GGUF file, or the embedded default's name.",
    )
    served_name: str | None = Field(
        None, min_length=1, description="Name clients ask for; default: the last part of path."
    )
    dtype: Dtype = Field("float32", description="Element type of weights and computation.")
    kv_dtype: KvDtype | None = Field(
        None,
        description="Element type of the KV cache; default: model.dtype. int8 and float8_e4m3fn "
        "are lossy and carry a scale per token and head.",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Context limit in tokens; default: the model's own."
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="auto: on GPUs without tensor parallelism decode steps are captured when a "
        "worker starts, and replayed; off: their kernels are launched one by one.",
    )
    deterministic: bool = Field(
        False,
        description="Compute every row alike whatever else is in the batch, at some cost on GPUs; "
        "docs/engine.md says what that promises.",
    )

    @property
    def name(self) -> str:
        return self.served_name or Path(self.path).name.removesuffix(".gguf")


class PoolConfig(Section):
    """One pool of equal workers."""

    workers: int = Field(1, ge=0, description="Worker processes in the pool.")
    tp: int = Field(
        1, ge=1, description="Tensor-parallel ranks of each worker, a process each, on one host."
    )
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV block.")
    kv_memory: Bytes | None = Field(
        None,
        description="KV cache per rank; default: 512MiB on the CPU; on a GPU what the weights and "
        "the largest step leave of gpu_memory.",
    )
    gpu_memory: float = Field(
        0.9,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Share of a GPU's memory that is filled where kv_memory says nothing; other "
        "processes' count.",
    )
    kv_dtype: KvDtype | None = Field(
        None, description="Element type of this pool's KV cache; default: model.kv_dtype."
    )
    threads: int = Field(1, ge=1, description="CPU threads per rank for tensor work.")
    max_batch_tokens: int = Field(
        512, ge=1, description="Tokens computed per step at most; the prefill chunk."
    )
    max_batch_seqs: int = Field(256, ge=1, description="Sequences per step at most.")
    prefix_cache: bool = Field(
        True, description="Keep finished blocks for prompts that share them."
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Interface the workers listen on; node: the address by which Ray knows the "
        "host that a worker is on.",
    )

    @property
    def host_nbytes(self) -> int:
        """Host memory per rank beside the KV cache, for blocks that are swapped out."""
        return 0

    def cache_dtype(self, model: ModelConfig) -> str:
        """Element type of this pool's KV caches."""
        return self.kv_dtype or model.kv_dtype or model.dtype


class PrefillConfig(PoolConfig):
    """The prefill pool."""


class DecodeConfig(PoolConfig):
    """The decode pool, or, with role ``both``, the colocated pool that does all."""

    role: Literal["decode", "both"] = Field(
        "decode", description="both: each worker prefills and decodes, and there is no transfer."
    )
    reserve_queue: int = Field(
        64, ge=1, description="Reservations that wait for blocks at most, per worker."
    )
    growth_tokens: int = Field(
        32, ge=1, description="Tokens each running sequence keeps room for in the ledger."
    )
    swap_memory: HostBytes = Field(
        parse_bytes("256MiB"),
        description="Host memory per rank for the KV of sequences that wait for blocks; it is "
        "taken as it is used. 0: they are given back to the router and computed again.",
    )

    @property
    def host_nbytes(self) -> int:
        return self.swap_memory


class TransferConfig(Section):
    """How KV moves from prefill to decode."""

    transport: TransportChoice = Field(
        "auto", description="Data path of KV; auto measures and takes the fastest."
    )
    wire_dtype: KvDtype | None = Field(
        None,
        description="Element type of KV on the wire; default: the narrower of the two caches' "
        "types. Lossy when narrower than the caches; int8 and float8_e4m3fn carry scales.",
    )
    push: Literal["auto", "layers", "whole"] = Field(
        "auto",
        description="layers: send KV while later layers compute; whole: after the prompt; auto "
        "decides for each prompt by measured rates.",
    )
    probe: bool = Field(
        True,
        description="Measure at the start what each pair of workers can use; without, the first "
        "transport that works is taken.",
    )
    streams: int = Field(2, ge=1, le=64, description="TCP connections per link for KV bytes.")
    trusted_network: bool = Field(
        False,
        description="Allow transports that cannot prove who connects to them: gloo, nccl and nixl.",
    )
    staging: Bytes = Field(parse_bytes("128MiB"), description="Slab memory per decode worker.")
    slab: Bytes = Field(parse_bytes("8MiB"), description="Size of a slab at most.")
    progress_timeout_s: Seconds = Field(
        5.0, description="A transfer without progress for this long is resent once, then fails."
    )
    lease_s: Seconds = Field(
        120.0, description="Longest life of a lease without renewal by its router."
    )


class RouterConfig(Section):
    """The router and its two APIs."""

    grpc: Address = Field(
        "127.0.0.1:50051", description="HOST:PORT of the gRPC API; port 0 takes a free one."
    )
    http: Address = Field(
        "127.0.0.1:8000", description="HOST:PORT of the OpenAI API; port 0 takes a free one."
    )
    queue_limit: int = Field(1024, ge=1, description="Requests waiting for dispatch at most.")
    max_attempts: int = Field(
        4, ge=1, description="Dispatches of one request without progress at most."
    )
    local_tokens: int = Field(
        64,
        ge=0,
        description="A decode worker that holds most of a prompt computes the rest itself where "
        "that is at most so many tokens and less than any prefill worker has before it; 0: never.",
    )
    default_max_tokens: int | None = Field(
        None, ge=1, description="Output limit when a request names none; default: the context."
    )
    request_timeout_s: Seconds = Field(600.0, description="Deadline of requests that name none.")


class ClusterConfig(Section):
    """Start-up, health and shutdown."""

    device: Literal["cpu", "cuda"] = Field("cpu", description="Where the workers compute.")
    ray_address: str = Field(
        "local", min_length=1, description="local starts Ray here; auto joins this node's cluster."
    )
    start_timeout_s: Seconds = Field(300.0, description="Start-up that takes longer fails.")
    stop_timeout_s: Seconds = Field(
        30.0, description="Requests in flight may finish for this long when the server stops."
    )
    beat_s: Seconds = Field(1.0, description="Sessions and links say that they live this often.")
    silence_s: Seconds = Field(5.0, description="Silence after which a peer counts as lost.")


class Config(Section):
    """The root of the tree."""

    model: ModelConfig = ModelConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _cross_role(self) -> Self:
        if self.decode.workers == 0:
            raise ValueError("decode.workers: must be at least 1: the decode pool answers requests")
        if self.decode.role == "decode" and self.prefill.workers == 0:
            raise ValueError(
                "prefill.workers: a decode pool needs a prefill pool; "
                "set prefill.workers: 1, or decode.role: both"
            )
        if self.decode.role == "both" and self.prefill.workers:
            raise ValueError(
                "prefill.workers: colocated workers prefill for themselves; "
                "set prefill.workers: 0, or decode.role: decode"
            )
        if self.cluster.silence_s <= 2 * self.cluster.beat_s:
            raise ValueError("cluster.silence_s: must be more than twice cluster.beat_s")
        self._check_transfer()
        return self

    def _check_transfer(self) -> None:
        transfer = self.transfer
        source, target = self.kv_dtype(self.prefill), self.kv_dtype(self.decode)
        if (
            self.decode.role == "decode"
            and source in QUANTISED_BYTES
            and not source == self.kv_wire == target
        ):
            raise ValueError(
                f"prefill.kv_dtype: KV of {source} is not converted to other types, but the wire's "
                f"is {self.kv_wire} and the decode pool's {target}; set decode.kv_dtype and "
                f"transfer.wire_dtype to {source}, or prefill.kv_dtype to a wider type"
            )
        if transfer.slab > transfer.staging:
            raise ValueError("transfer.slab: must not be larger than transfer.staging")
        if transfer.transport in UNAUTHENTICATED and not transfer.trusted_network:
            raise ValueError(
                f"transfer.transport: {transfer.transport} takes KV from whoever connects to it; "
                "set transfer.trusted_network: true where nobody else can, or choose tcp"
            )
        if transfer.transport in ON_DEVICE and self.cluster.device == "cpu":
            raise ValueError(
                f"transfer.transport: {transfer.transport} moves KV between GPUs; "
                "with cluster.device: cpu choose shm, tcp or auto"
            )

    def kv_dtype(self, pool: PoolConfig) -> str:
        """Element type of the KV caches of a pool."""
        return pool.cache_dtype(self.model)

    @property
    def kv_wire(self) -> str:
        """Element type of KV on its way into the decode pool's caches."""
        own = self.kv_dtype(self.decode)
        if self.decode.role == "both":
            return own
        # Of two equally narrow ones the prefill pool's: a value is then rounded once.
        narrower = min(self.kv_dtype(self.prefill), own, key=ELEMENT_BYTES.__getitem__)
        return self.transfer.wire_dtype or narrower


def parse_config(values: dict[str, Any]) -> Config:
    """Check plain values as a whole. Raises ConfigError naming the first wrong key."""
    refuse_unknown_keys(values, Config)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if not key and ":" in message:
            key, message = message.split(": ", 1)
        raise ConfigError(key or "configuration", message) from None


def load_config(path: Path | None, overrides: dict[str, Any] | None = None) -> Config:
    """Read a YAML file (None: defaults), lay dotted overrides over it, check the whole.

    Raises ConfigError naming the file or the first wrong key.
    """
    values: Any = {}
    if path is not None:
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(str(path), f"is not valid YAML: {reason}") from None
    if not isinstance(values, dict):
        raise ConfigError(str(path), "must hold a mapping of sections")
    for dotted, value in (overrides or {}).items():
        set_dotted(values, dotted, value)
    return parse_config(values)
