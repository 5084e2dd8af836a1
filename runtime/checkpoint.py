"""A checkpoint at rest: the interface that loading is written against, and the Hugging Face folder behind it.

Headers are read and checked when a folder is opened; a tensor is read when it is asked for. What is missing, cut off or damaged
is said with the file and the tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

_MAX_HEADER = 100 << 20  # what the safetensors format allows


class CheckpointError(ValueError):
    """A checkpoint that cannot be read. The message names the file, the tensor where there is one, and what to do."""


class TensorInfo(NamedTuple):
    """What a header says of a tensor, without reading it."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it: "F32", "F16", "BF16", ...; GGUF blocks count as the "F32" they become
    file: Path


class Checkpoint(Protocol):
    """A model at rest: its Hugging Face config and its tensors, by their Hugging Face names."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def get(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in the dtype it is stored in (quantised ones in fp32)."""
        ...


class FolderCheckpoint:
    """A Hugging Face folder. Files are mapped, so a tensor is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self.tensors: dict[str, TensorInfo] = {}
        for file, expected in _tensor_files(path).items():
            found = _read_header(file)
            absent = sorted(set(expected) - found.keys())
            if absent:
                raise CheckpointError(f"{file}: tensor {absent[0]} is missing, though the index places it here ({len(absent)} such)")
            self.tensors.update({name: info for name, info in found.items() if not expected or name in expected})
        self._open: dict[Path, Any] = {}

    def get(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        file = self.tensors[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from ``file``. Raises CheckpointError when it is absent, not JSON, or not an object."""
    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def _tensor_files(path: Path) -> dict[Path, list[str]]:
    """The files to read and the tensors that the index places there (none named: all in the file)."""
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").exists():
        return {path / "model.safetensors": []}
    if not index.exists():
        other = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f"; found {', '.join(other)}: give a .gguf file by its own path, convert others to safetensors" if other else ""
        raise CheckpointError(f"{path}: neither model.safetensors nor model.safetensors.index.json{hint}")
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(name, str) for name in placed.values()):
        raise CheckpointError(f"{index}: expected weight_map, a mapping from tensor to file")
    files: dict[Path, list[str]] = {}
    for tensor, name in placed.items():
        file = path / name
        if not file.exists():
            raise CheckpointError(f"{file}: missing, the index places tensor {tensor} in it; download the whole checkpoint")
        files.setdefault(file, []).append(tensor)
    return files


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file; sizes are checked here, because the library's own error does not name a tensor."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > _MAX_HEADER:
            raise CheckpointError(f"{file}: not a safetensors file, or cut off in its header ({size} bytes)")
        raw = stream.read(length)
    if len(raw) < length:
        raise CheckpointError(f"{file}: cut off in its header: {size} bytes, expected more than {8 + length}; download it again")
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: TensorInfo(tuple(item["shape"]), item["dtype"], file) for name, item in header.items()}
        ends = {name: 8 + length + item["data_offsets"][1] for name, item in header.items()}
        end = max(ends.values(), default=8 + length)
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file}: damaged header: {error!r}; download it again") from error
    if size < end:
        cut = min((name for name in ends if ends[name] > size), key=lambda name: ends[name])
        raise CheckpointError(f"{file}: cut off in tensor {cut}: {size} bytes, expected {end}; download it again")
    return tensors
