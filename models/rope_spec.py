"""Rotary position embedding as a checkpoint states it: plain numbers, read once, checked whole.

Config files spell the same thing in several ways: scaling under ``rope_scaling`` or the newer
``rope_parameters``, its kind under ``type`` or ``rope_type``, longrope also as ``su``, and the
base beside the scaling or inside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvferry.core.errors import ModelLoadError


class RopeType(StrEnum):
    """How rotary frequencies are stretched beyond the length a model was trained for."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


_OLD_NAMES = {"su": "longrope", "none": "default"}
_WITH_ORIGINAL_LENGTH = (RopeType.LLAMA3, RopeType.YARN, RopeType.LONGROPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Parameters of one model's rotary embedding; those its type does not use keep their
    defaults.
    """

    type: RopeType = RopeType.DEFAULT
    theta: float = 10000.0
    factor: float = 1.0
    max_position: int
    """``max_position_embeddings`` of the config file, in tokens."""
    original_length: int
    """Context length of pre-training, in tokens: where scaling starts."""
    attention_factor: float | None = None
    """Multiplies cos and sin (yarn, longrope); None: derived from ``factor``."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def context_limit(self) -> int:
        """Tokens the model can attend over after scaling.

        yarn states the length it was trained for, so the limit is factor x original. linear and
        dynamic state the stretch over ``max_position_embeddings``. llama3 and longrope configs
        carry the stretched length already.
        """
        if self.type is RopeType.YARN:
            return int(self.original_length * self.factor)
        if self.type in (RopeType.LINEAR, RopeType.DYNAMIC):
            return int(self.max_position * self.factor)
        return self.max_position


def parse_rope(config: Mapping[str, Any], max_position: int, head_dim: int) -> RopeSpec:
    """Read the rotary part of a config. Raises ModelLoadError for an unknown type or a missing or
    odd parameter.
    """
    newer = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or newer
    for key, value in (("rope_parameters", newer), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"{key}: must be an object, not {value!r}")
    name = scaling.get("rope_type") or scaling.get("type")
    if not name and scaling.get("factor") not in (None, 1, 1.0):
        raise ModelLoadError("rope_scaling: rope_type is missing, and its factor would be ignored")
    name = name or "default"
    name = _OLD_NAMES.get(name, name)
    if name not in set(RopeType):
        raise ModelLoadError(
            f"rope_scaling: type {name!r} is not supported; supported are {', '.join(RopeType)}"
        )
    for source in (scaling, config):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ModelLoadError(
                "partial_rotary_factor: only full rotary embeddings (1.0) are supported"
            )
    kind = RopeType(name)
    thetas = (source.get("rope_theta") for source in (scaling, newer, config))
    theta = next((value for value in thetas if value is not None), 10000.0)
    values: dict[str, Any] = {"theta": _positive(theta, "rope_theta")}
    original = max_position
    if kind in _WITH_ORIGINAL_LENGTH:
        key = "original_max_position_embeddings"
        original = int(_positive(config.get(key) or scaling.get(key) or max_position, key))
    if kind is RopeType.LONGROPE:
        values |= _longrope(scaling, head_dim, max_position / original)
    elif kind is not RopeType.DEFAULT:
        values["factor"] = _positive(scaling.get("factor"), "rope_scaling.factor")
    if kind is RopeType.LLAMA3:
        for key in ("low_freq_factor", "high_freq_factor"):
            values[key] = _positive(scaling.get(key), f"rope_scaling.{key}")
        if values["low_freq_factor"] == values["high_freq_factor"]:
            raise ModelLoadError("rope_scaling: low_freq_factor and high_freq_factor must differ")
    if kind is RopeType.YARN:
        values |= _yarn(scaling)
    return RopeSpec(type=kind, max_position=max_position, original_length=original, **values)


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelLoadError(f"{name}: must be a positive number, not {value!r}")
    return value


def _yarn(scaling: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"truncate": bool(scaling.get("truncate", True))}
    for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"):
        if scaling.get(key):
            values[key] = _positive(scaling[key], f"rope_scaling.{key}")
    return values


def _longrope(scaling: Mapping[str, Any], head_dim: int, stretch: float) -> dict[str, Any]:
    values: dict[str, Any] = {
        "factor": _positive(scaling.get("factor") or stretch, "rope_scaling.factor")
    }
    if scaling.get("attention_factor") is not None:
        values["attention_factor"] = _positive(
            scaling["attention_factor"], "rope_scaling.attention_factor"
        )
    for key in ("short_factor", "long_factor"):
        factors = scaling.get(key)
        if not isinstance(factors, list) or len(factors) != head_dim // 2:
            raise ModelLoadError(
                f"rope_scaling.{key}: must be a list of {head_dim // 2} numbers (head_dim / 2)"
            )
        values[key] = tuple(_positive(value, f"rope_scaling.{key}") for value in factors)
    return values
