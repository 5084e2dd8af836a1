"""Rotary position embedding: frequencies and the cos/sin table, scaled as a model's config says.

    angle[p, i] = p · inv_freq[i],   inv_freq[i] = theta^(-2i / head_dim), then scaled

Scalings: default, linear, llama3, yarn (functions of the position alone), longrope and dynamic NTK (functions of the position
and of the sequence's present length). The formulas are those of transformers 5.24, in the same order and in fp32, so the
tables agree to the last bit.
Sources: arXiv 2104.09864 (RoPE), 2309.00071 (NTK, YaRN), 2402.13753 (LongRoPE).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


class SpecError(ValueError):
    """A model config that cannot be run here. The message names the key, the value and what was expected."""


_LONG = {"original_max_position_embeddings", "attention_factor"}
# By scaling: the keys that must be there, and those that may.
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
    "yarn": ({"factor"}, _LONG | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned"}),
    "longrope": ({"short_factor", "long_factor"}, _LONG | {"factor"}),
}
_COMMON = {"rope_type", "type", "rope_theta"}


@dataclass(frozen=True)
class RopeSpec:
    """``kind`` names the scaling; ``values`` are its numbers, by the names of the config; ``trained_positions`` is the length
    that the scaling starts from and ``max_positions`` the length that it reaches."""

    kind: str
    theta: float
    head_dim: int
    trained_positions: int
    max_positions: int
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def depends_on_length(self) -> bool:
        """True where a token's rotation depends on how long its sequence is now: cached keys are then not shared between requests."""
        return self.kind in ("dynamic", "longrope")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, head_dim: int, max_positions: int) -> RopeSpec:
        """Read ``rope_parameters`` (new) or ``rope_scaling`` (old) and ``rope_theta``. Raises SpecError naming the key."""
        where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        found = config.get(where) or {}
        if not isinstance(found, Mapping):
            raise SpecError(f"{where}: expected a mapping, got {found!r}")
        found = {key: value for key, value in found.items() if value is not None}
        for key, value in found.items():
            if isinstance(value, Mapping):
                raise SpecError(f"{where}.{key}: rotary parameters by layer type are not supported")
        partial = found.pop("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
        if partial != 1.0:
            raise SpecError(f"partial_rotary_factor: expected 1.0 in this family, got {partial!r}")
        kind = str(found.get("rope_type", found.get("type", "default")))
        if kind not in _KEYS:
            raise SpecError(f"{where}.rope_type: expected one of {', '.join(_KEYS)}, got {kind!r}")
        required, optional = _KEYS[kind]
        for key in found:
            if key not in _COMMON | required | optional:
                near = difflib.get_close_matches(key, required | optional | _COMMON, n=1)
                raise SpecError(f"{where}.{key}: unknown for rope_type {kind!r}; " + (f"did you mean {near[0]}?" if near else "remove it"))
        original = int(config.get("original_max_position_embeddings") or found.get("original_max_position_embeddings") or max_positions)
        if kind == "yarn" and original != max_positions:
            found.setdefault("factor", max_positions / original)
        for key in sorted(required - found.keys()):
            raise SpecError(f"{where}.{key}: missing, rope_type {kind!r} needs it")
        theta = found.get("rope_theta", config.get("rope_theta") or 10000.0)
        values = {key: value for key, value in found.items() if key not in _COMMON and key != "original_max_position_embeddings"}
        for key, value in {**values, "rope_theta": theta}.items():
            _check_value(f"{where}.{key}", value, head_dim)
        reach = max_positions
        if kind in ("linear", "dynamic"):
            reach = max(max_positions, int(max_positions * values["factor"]))
        elif kind == "yarn":
            reach = max(max_positions, int(original * values["factor"]))
        if kind == "dynamic" and head_dim < 4:
            raise SpecError(f"head_dim: expected 4 or more with rope_type 'dynamic', got {head_dim}")
        trained = original if kind in ("llama3", "yarn", "longrope") else max_positions
        return cls(kind, float(theta), head_dim, trained, reach, values)


def _check_value(where: str, value: Any, head_dim: int) -> None:
    name = where.rpartition(".")[2]
    if name in ("short_factor", "long_factor"):
        if not isinstance(value, (list, tuple)) or len(value) != head_dim // 2:
            raise SpecError(f"{where}: expected a list of {head_dim // 2} numbers (head_dim / 2), got {value!r}")
    elif name in ("truncate", "finetuned"):
        if not isinstance(value, bool):
            raise SpecError(f"{where}: expected true or false, got {value!r}")
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise SpecError(f"{where}: expected a positive number, got {value!r}")


def _plain(rope: RopeSpec) -> torch.Tensor:
    return 1.0 / (rope.theta ** (torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim))


def _llama3(rope: RopeSpec) -> torch.Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended linearly in the frequency."""
    factor, low, high = (rope.values[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    inv_freq = _plain(rope)
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > rope.trained_positions / low, inv_freq / factor, inv_freq)
    blend = (rope.trained_positions / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / factor + blend * stretched
    between = (wavelength >= rope.trained_positions / high) & (wavelength <= rope.trained_positions / low)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeSpec) -> tuple[torch.Tensor, float]:
    values, dim = rope.values, rope.head_dim
    factor = values["factor"]

    def temperature(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = values.get("attention_factor")
    if attention is None:
        mscale, mscale_all = values.get("mscale"), values.get("mscale_all_dim")
        attention = temperature(factor, mscale) / temperature(factor, mscale_all) if mscale and mscale_all else temperature(factor)

    def dimension(rotations: float) -> float:  # the dimension that turns so often over the trained length
        return (dim * math.log(rope.trained_positions / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension(values.get("beta_fast", 32)), dimension(values.get("beta_slow", 1))
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    powers = rope.theta ** (torch.arange(0, dim, 2).to(torch.float32) / dim)
    keep = 1 - ramp
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, float(attention)


def _longrope(rope: RopeSpec, which: str) -> tuple[torch.Tensor, float]:
    factor = rope.values.get("factor", rope.max_positions / rope.trained_positions)
    attention = rope.values.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(rope.trained_positions))
    stretch = torch.tensor(rope.values[which], dtype=torch.float32)
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.int64).float() / rope.head_dim
    return 1.0 / (stretch * rope.theta**exponents), float(attention)


def _rows(inv_freq: torch.Tensor, attention: float, count: int) -> torch.Tensor:
    angles = torch.arange(count, dtype=torch.float32)[:, None] * inv_freq  # [count, head_dim / 2]
    return torch.cat((angles.cos() * attention, angles.sin() * attention), -1)


def inverse_frequencies(rope: RopeSpec, which: str = "short_factor") -> tuple[torch.Tensor, float]:
    """([head_dim / 2] fp32, the factor on cosines and sines); ``which`` picks the set of longrope; not for dynamic NTK."""
    if rope.kind == "yarn":
        return _yarn(rope)
    if rope.kind == "longrope":
        return _longrope(rope, which)
    if rope.kind == "llama3":
        return _llama3(rope), 1.0
    return _plain(rope) / rope.values.get("factor", 1.0), 1.0


def cos_sin_table(rope: RopeSpec) -> torch.Tensor | None:
    """[rows, head_dim] fp32 on the CPU: cosines, then sines.

    One row a position; for longrope the rows of the short factors and after them those of the long ones; None for dynamic
    NTK, whose frequencies change with every length.
    """
    if rope.kind == "dynamic":
        return None
    sets = ("short_factor", "long_factor") if rope.kind == "longrope" else ("",)
    return torch.cat([_rows(*inverse_frequencies(rope, which), rope.max_positions) for which in sets])


class Rotary(nn.Module):
    """Gives a step its rows of cosines and sines.

    forward(positions [tokens] int64, seq_lens [seqs] int32, cu_seqlens_q [seqs + 1] int32)
        -> rows [tokens] int64, cos_sin [any, head_dim] fp32, so that token t rotates by ``cos_sin[rows[t]]``.

    Where the scaling depends on the length it is that of the token's own sequence, new tokens included: what transformers does
    for a sequence alone, and the neighbours in a batch do not matter.
    """

    cos_sin: torch.Tensor | None

    def __init__(self, rope: RopeSpec, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.rope = rope
        table = cos_sin_table(rope)
        self.register_buffer("cos_sin", None if table is None else table.to(device), persistent=False)
        exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
        self.register_buffer("exponents", exponents.to(device) if table is None else None, persistent=False)

    def forward(self, positions: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.rope.depends_on_length:
            assert self.cos_sin is not None
            return positions, self.cos_sin
        tokens = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
        sequence = torch.searchsorted(cu_seqlens_q[1:], tokens, right=True).clamp(max=seq_lens.shape[0] - 1)
        length = seq_lens[sequence]  # [tokens]; padding tokens past the last sequence read any, their output is dropped
        if self.cos_sin is not None:
            return positions + (length > self.rope.trained_positions) * self.rope.max_positions, self.cos_sin
        factor, trained, dim = self.rope.values["factor"], self.rope.trained_positions, self.rope.head_dim
        stretch = (factor * length.clamp(min=trained) / trained) - (factor - 1)
        theta = self.rope.theta * stretch ** (dim / (dim - 2))
        inv_freq = 1.0 / theta[:, None] ** self.exponents  # [tokens, head_dim / 2]
        angles = positions[:, None].float() * inv_freq
        return tokens.long(), torch.cat((angles.cos(), angles.sin()), -1)
