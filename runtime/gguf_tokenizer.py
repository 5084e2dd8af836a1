"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

Byte-level BPE with a known way to split text is built here with the ``tokenizers`` package; SentencePiece vocabularies and
unknown splits go through transformers, which an extra brings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from runtime.checkpoint import CheckpointError

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")  # the same with single digits
# tokenizer.ggml.pre -> the expression that cuts text into words; "" is GPT-2's own, in the byte-level step
_SPLITS = {
    "gpt-2": "",
    "default": "",
    "smollm": "",
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def write_tokenizer(path: Path, fields: dict[str, Any], folder: Path) -> None:
    """Write the tokenizer described by the metadata ``fields`` of the GGUF file ``path`` into ``folder``.

    Raises CheckpointError when the file holds no tokenizer, or one that needs transformers where that is not installed.
    """
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens is missing; the file holds no tokenizer")
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and pre in _SPLITS:
        _byte_level(path, fields, pre).save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, **_special_tokens(fields)}, indent=2, ensure_ascii=False))
    else:
        _through_transformers(path, f"{kind}/{pre}", folder)


def _special_tokens(fields: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    config: dict[str, Any] = {name: fields["tokenizer.ggml.tokens"][index] for name, index in ids.items() if index is not None}
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config


def _byte_level(path: Path, fields: dict[str, Any], pre: str) -> Tokenizer:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type", [])
    merges = fields.get("tokenizer.ggml.merges")
    if merges is None:
        raise CheckpointError(f"{path}: tokenizer.ggml.merges is missing, byte-level BPE needs it")
    vocab = {token: index for index, token in enumerate(tokens)}
    ignore_merges = _SPLITS[pre] == _LLAMA3  # a word that is a token is taken whole there
    pairs: list[tuple[str, str]] = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges))
    if pre == "smollm":
        first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
    elif _SPLITS[pre]:
        first = [pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")]
    else:
        first = []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not _SPLITS[pre])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    if _SPLITS[pre] == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(token, normalized=False, special=special) for token, k in zip(tokens, kinds, strict=False) if k == kind]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token", _SPLITS[pre] == _LLAMA3):
        token = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, bos)])
    return tokenizer


def _through_transformers(path: Path, kind: str, folder: Path) -> None:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(f"{path}: its tokenizer ({kind}) is converted by transformers: pip install 'tkernels[gguf]'") from error
    try:
        AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{path}: its tokenizer ({kind}) cannot be converted: {error}") from error
