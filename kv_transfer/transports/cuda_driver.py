"""Device memory that another process may open: the few calls of the CUDA driver that it takes.

torch's allocator cuts such memory out of larger pieces, or maps it in segments that no handle
covers; so it is allocated here, apart from torch, and no object of either process is pickled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HANDLE_BYTES = 64
UUID_BYTES = 16
GRANULE = 2 << 20
"""The driver cuts smaller allocations out of pieces of this size, and a handle opens all of one."""
LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * UUID_BYTES),)


_POINTER, _SIZE, _DEVICE, _CONTEXT = (
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)


def _to(kind: Any) -> Any:
    return ctypes.POINTER(kind)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (_to(_DEVICE), ctypes.c_int),
    "cuDeviceGetCount": (_to(ctypes.c_int),),
    "cuDeviceGetUuid_v2": (_to(_Uuid), _DEVICE),
    "cuDeviceCanAccessPeer": (_to(ctypes.c_int), _DEVICE, _DEVICE),
    "cuDevicePrimaryCtxRetain": (_to(_CONTEXT), _DEVICE),
    "cuCtxPushCurrent_v2": (_CONTEXT,),
    "cuCtxPopCurrent_v2": (_to(_CONTEXT),),
    "cuMemAlloc_v2": (_to(_POINTER), _SIZE),
    "cuMemFree_v2": (_POINTER,),
    "cuMemGetAddressRange_v2": (_to(_POINTER), _to(_SIZE), _POINTER),
    "cuIpcGetMemHandle": (_to(_Handle), _POINTER),
    "cuIpcOpenMemHandle_v2": (_to(_POINTER), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_POINTER,),
    "cuGetErrorName": (ctypes.c_int, _to(ctypes.c_char_p)),
}


class CudaError(RuntimeError):
    """A call of the driver failed."""


class CudaDriver:
    """One device of this process, in the context that torch uses too. Any thread may call it.

    Raises OSError where there is no driver, CudaError where there is no such device.
    """

    def __init__(self, ordinal: int, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._call("cuInit", 0)
        self._device = _DEVICE()
        self._call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        # Never released: torch has it for as long as the process lives.
        self._primary = _CONTEXT()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._primary), self._device)

    @property
    def uuid(self) -> bytes:
        """Of the device; of its slice where it is partitioned."""
        return self._uuid_of(self._device)

    def why_not_reach(self, uuid: bytes) -> str | None:
        """Why this device cannot use memory of another one, or of itself; None when it can."""
        if uuid == self.uuid:
            return None
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        for ordinal in range(count.value):
            other = _DEVICE()
            self._call("cuDeviceGet", ctypes.byref(other), ordinal)
            if self._uuid_of(other) != uuid:
                continue
            access = ctypes.c_int()
            self._call("cuDeviceCanAccessPeer", ctypes.byref(access), self._device, other)
            return None if access.value else "the two GPUs have no access to each other's memory"
        return "the peer's GPU is not visible to this process"

    def allocate(self, nbytes: int) -> int:
        """The address of fresh memory, at least so large, that nothing else shares a piece with."""
        address = _POINTER()
        with self._context():
            self._call("cuMemAlloc_v2", ctypes.byref(address), -(-nbytes // GRANULE) * GRANULE)
        return address.value

    def free(self, address: int) -> None:
        with self._context():
            self._call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """What another process needs to open allocated memory."""
        handle = _Handle()
        with self._context():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.data)

    def open(self, handle: bytes) -> tuple[int, int]:
        """(address, bytes) here of memory that another process exported.

        Raises CudaError, ValueError for bytes that are no handle.
        """
        address, base, nbytes = _POINTER(), _POINTER(), _SIZE()
        with self._context():
            opened = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, _LAZY_PEER_ACCESS)
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
        return address.value, base.value + nbytes.value - address.value

    def close(self, address: int) -> None:
        """Give back what ``open`` gave."""
        with self._context():
            self._call("cuIpcCloseMemHandle", address)

    def _uuid_of(self, device: ctypes.c_int) -> bytes:
        uuid = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        return bytes(uuid.data)

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Calls on memory need the device's context on the thread that makes them."""
        popped = _CONTEXT()
        self._call("cuCtxPushCurrent_v2", self._primary)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(popped))

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(text))
            known = text.value.decode() if text.value else f"error {result}"
            raise CudaError(f"{name}: {known}")
