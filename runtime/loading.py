"""From what the configuration names to a model with its tokenizer and its end-of-sequence tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from runtime.checkpoint import read_json
from runtime.config import ConfigError, ModelConfig
from runtime.model import CausalLM, load_model, random_model, resolve_device, resolve_dtype
from runtime.parallel import TensorParallel
from runtime.rotary import SpecError
from runtime.shapes import NAMED
from runtime.text import Tokenizer
from runtime.weights import find_packaged_gguf, prepare

_PACKAGE = "package:"
_RANDOM = "random:"


class Loaded(NamedTuple):
    model: CausalLM
    tokenizer: Tokenizer | None
    eos_tokens: frozenset[int]


def load(path: str | Path, config: ModelConfig, report: Callable[[str], None], parallel: TensorParallel | None = None) -> Loaded:
    """Load a Hugging Face folder, a ``.gguf`` file (converted once into the cache), ``package:NAME`` or ``random:SHAPE``.

    ``package:``: the GGUF file that an installed Python package brings. ``random:``: seeded random weights of a shape in
    ``runtime.shapes``, in bf16 on a GPU, without a tokenizer. parallel: load this rank's share.
    Raises ConfigError, CheckpointError or SpecError before anything big is read where that is possible.
    """
    try:
        resolve_dtype(config.dtype, torch.float32, resolve_device(config.device))
    except ValueError as error:
        raise ConfigError(f"model.{error}") from error  # under the names that the configuration has for them
    if str(path).startswith(_RANDOM):
        name = str(path).removeprefix(_RANDOM)
        if name not in NAMED:
            raise ConfigError(f"model.path: expected random: and one of {', '.join(NAMED)}, got {str(path)!r}")
        report(f"making random weights of the shape {name}")
        return Loaded(random_model({**NAMED[name], "dtype": "bfloat16"}, 0, config.dtype, config.device, parallel), None, frozenset())
    folder = _locate(path, report)
    report(f"loading {folder}")
    eos_tokens = _eos_tokens(folder)  # these two first: what is wrong with them is said before the weights are read
    tokenizer = Tokenizer.open(folder) if (folder / "tokenizer.json").is_file() else None
    return Loaded(load_model(folder, config.dtype, config.device, parallel), tokenizer, eos_tokens)


def _locate(path: str | Path, report: Callable[[str], None]) -> Path:
    if not str(path):
        raise ConfigError(
            f'model.path: expected a Hugging Face folder, a .gguf file, "{_PACKAGE}NAME" or "{_RANDOM}SHAPE", got nothing; '
            "give --model.path or --config FILE"
        )
    if str(path).startswith(_PACKAGE):
        path = find_packaged_gguf(str(path).removeprefix(_PACKAGE))
    path = Path(path).expanduser()
    if not path.exists():
        raise ConfigError(f"model.path: {path}: no such file or folder; expected a Hugging Face folder or a .gguf file")
    if path.suffix == ".gguf":
        report(f"looking for the converted {path.name}, else converting it once; this takes about half a minute")
    return prepare(path)


def _eos_tokens(folder: Path) -> frozenset[int]:
    """From generation_config.json, which knows of end-of-turn tokens, else from config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        value = read_json(file).get("eos_token_id") if file.is_file() else None
        if value is None:
            continue
        tokens = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise SpecError(f"{file}: eos_token_id: expected an integer or a list of them, got {value!r}")
        return frozenset(tokens)
    return frozenset()
