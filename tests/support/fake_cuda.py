"""Builds ``fake_cuda.c``, a CUDA driver over host memory."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from kvferry.kv_transfer.transports.cuda_driver import CudaDriver
from kvferry.kv_transfer.transports.cuda_ipc import IpcChannel

SOURCE = Path(__file__).with_suffix(".c")


def build_fake_cuda(folder: Path) -> Path:
    """The library. Skips where there is no compiler or no header of NVIDIA's."""
    triton = importlib.util.find_spec("triton")
    compiler = shutil.which("cc")
    if triton is None or triton.origin is None or compiler is None:
        pytest.skip("a C compiler and triton's copy of cuda.h are needed")
    include = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    library = folder / "libfakecuda.so"
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{include}"]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return library


def fake_ipc_channel(library: str, sock: socket.socket, ordinal: int = 0) -> IpcChannel:
    """One side of a link whose device memory is host memory."""
    return IpcChannel(sock, CudaDriver(ordinal, library), torch.device("cpu"))
