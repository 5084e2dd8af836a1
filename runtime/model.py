"""Models ready to run: loaded from a checkpoint or filled with seeded random weights, and the KV cache they need.

``load_model("SmolLM2-135M-Instruct", "auto", "auto")`` → ``CausalLM``; then ``model.bind_cache(allocate_cache(model.spec, 64, 16))``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint import CheckpointError
from runtime.decoder import CausalLM
from runtime.parallel import ParallelCausalLM, TensorParallel
from runtime.rotary import SpecError
from runtime.spec import ModelSpec
from runtime.weights import open_checkpoint
from tkernels._target import target_of

__all__ = [
    "CausalLM",
    "CheckpointError",
    "ModelSpec",
    "SpecError",
    "allocate_cache",
    "load_model",
    "random_model",
    "resolve_device",
    "resolve_dtype",
]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
_STORED = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by safetensors' names
_MODEL_DTYPES = ("float32", "float16", "bfloat16")
# Tensors of a checkpoint that a model may leave unread: tables that are computed, and the copy of a tied head.
_UNREAD = re.compile(r".*\.rotary_emb\.inv_freq")


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """ "auto" (the GPU where there is one), "cpu", "cuda" or "cuda:N". Raises ValueError when this machine does not have it."""
    if device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f'device: expected "auto", "cpu", "cuda" or "cuda:N", got {str(device)!r}')
    if found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        why = "this torch is built without CUDA" if torch.version.cuda is None and torch.version.hip is None else "torch sees no GPU"
        raise ValueError(f'device: expected a device of this machine, got {str(device)!r}, but {why}; use "cpu" or "auto"')
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= count:
        raise ValueError(f"device: expected cuda:0 to cuda:{count - 1} on this machine, got {str(device)!r}")
    return torch.device("cuda", index)


def resolve_dtype(dtype: str | torch.dtype, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """ "auto" is fp32 on the CPU and ``stored`` elsewhere. Raises ValueError for a dtype that no model or not this device has."""
    found = _named_dtype(dtype, _MODEL_DTYPES)
    if found is None:
        found = torch.float32 if device.type == "cpu" else stored
    _check_device_has(found, device)
    return found


def _named_dtype(dtype: str | torch.dtype, known: tuple[str, ...]) -> torch.dtype | None:
    """The dtype of a name, None for "auto"."""
    if dtype == "auto":
        return None
    for name in known:
        if dtype in (name, _DTYPES[name]):
            return _DTYPES[name]
    raise ValueError(f'dtype: expected "auto" or one of {", ".join(known)}, got {dtype!r}')


def _check_device_has(dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cuda":
        return
    target = target_of(device)
    if dtype == torch.bfloat16 and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        raise ValueError(f"dtype: bfloat16 needs an sm_80 or newer GPU, this one ({device}) is {target.arch}; use float16")
    if dtype == torch.float8_e4m3fn and not target.has_fp8:
        raise ValueError(f"dtype: fp8_e4m3 needs an sm_89 or newer GPU, this one ({device}) is {target.arch}; use bfloat16 or float16")


@torch.inference_mode(False)  # what is made in inference mode can be written in inference mode only
def load_model(
    path: str | Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto", parallel: TensorParallel | None = None
) -> CausalLM:
    """Load a Hugging Face folder or a GGUF file.

    dtype: "auto" (the checkpoint's, fp32 on the CPU), "float32", "float16" or "bfloat16", or the torch dtype.
    parallel: load this rank's share only.
    Raises CheckpointError (file and tensor named), SpecError (config key named), or ValueError for dtype and device.
    """
    if not str(path):
        raise CheckpointError("path is empty: expected a Hugging Face folder or a .gguf file")
    checkpoint = open_checkpoint(path)
    try:
        spec = ModelSpec.from_config(checkpoint.config)
    except SpecError as error:
        raise SpecError(f"{checkpoint.path}: {error}") from None
    stored = spec.dtype
    if not (checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")):  # then the weights themselves say it
        kinds = {_STORED.get(info.dtype, torch.float32) for info in checkpoint.tensors.values()}
        stored = kinds.pop() if len(kinds) == 1 else torch.float32
    where = resolve_device(device)
    spec = dataclasses.replace(spec, dtype=resolve_dtype(dtype, stored, where))
    model = _make(spec, where, parallel)
    views = model.hf_state_dict()
    shapes = {name: tuple(view.shape) for name, view in (views if parallel is None else _make(spec, "meta").hf_state_dict()).items()}
    for name, shape in shapes.items():  # all shapes before the first read: a wrong checkpoint fails at once
        if name not in checkpoint.tensors:
            raise CheckpointError(f"{checkpoint.path}: tensor {name} is missing; the config asks for it")
        info = checkpoint.tensors[name]
        if info.shape != shape:
            raise CheckpointError(f"{info.file}: tensor {name}: expected {list(shape)} from the config, got {list(info.shape)}")
        if info.dtype not in _STORED:
            raise CheckpointError(
                f"{info.file}: tensor {name}: expected one of {', '.join(_STORED)}, got {info.dtype}; quantised weights do not load"
            )
    unread = [name for name in checkpoint.tensors if name not in views and not _UNREAD.fullmatch(name)]
    if spec.tied:
        unread = [name for name in unread if name != "lm_head.weight"]
    if unread:
        raise CheckpointError(f"{checkpoint.path}: tensor {unread[0]} has no place in the model of the config ({len(unread)} such)")
    for name, view in views.items():
        full = checkpoint.get(name)
        view.copy_(full if parallel is None else parallel.cut(name, full, spec))
    return model


def _make(spec: ModelSpec, device: torch.device | str, parallel: TensorParallel | None = None) -> CausalLM:
    return CausalLM(spec, device) if parallel is None else ParallelCausalLM(spec, parallel, device)


@torch.inference_mode(False)
def random_model(
    config: Mapping[str, Any] | ModelSpec,
    seed: int = 0,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    parallel: TensorParallel | None = None,
) -> CausalLM:
    """A model of ``config`` (Hugging Face keys) with seeded random weights, scaled so that signals keep their size.

    Matrices are normal with deviation inputs^-½, norms about 1, biases about 0, both with deviation 0.1. Drawn in fp32 on the
    device and rounded, so one seed gives the same weights in every dtype on one kind of device.
    ``model.hf_state_dict()`` gives them to transformers. parallel: this rank's share of the same weights.
    """
    where = resolve_device(device)
    spec = config if isinstance(config, ModelSpec) else ModelSpec.from_config(config)
    spec = dataclasses.replace(spec, dtype=resolve_dtype(dtype, spec.dtype, where))
    model = _make(spec, where, parallel)
    shapes = (model if parallel is None else _make(spec, "meta")).hf_state_dict()
    generator = torch.Generator(where).manual_seed(seed)
    for name, view in model.hf_state_dict().items():
        noise = torch.randn(shapes[name].shape, dtype=torch.float32, device=where, generator=generator)
        full = noise * noise.shape[1] ** -0.5 if noise.dim() > 1 else 0.1 * noise
        if "norm" in name:
            full = 1 + full
        view.copy_(full if parallel is None else parallel.cut(name, full, spec))
    return model


@torch.inference_mode(False)
def allocate_cache(
    spec: ModelSpec, num_pages: int, page_size: int, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Zeroed (k, v) caches, one pair a layer, each [num_pages, page_size, kv_heads, head_dim] and on its own.

    dtype: "auto" is the model's. Zeroed, because page 0 is read by masked lanes and must be finite.
    """
    for name, count in (("num_pages", num_pages), ("page_size", page_size)):
        if count < 1:
            raise ValueError(f"{name}: expected 1 or more, got {count}")
    where = resolve_device(device)
    found = _named_dtype(dtype, tuple(_DTYPES)) or spec.dtype
    _check_device_has(found, where)
    shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
    return [(torch.zeros(shape, dtype=found, device=where), torch.zeros(shape, dtype=found, device=where)) for _ in range(spec.num_layers)]
