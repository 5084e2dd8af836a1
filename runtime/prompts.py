"""Prompts as they are given: a text, token ids or several of either, with parameters for all or one each."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runtime.request import RequestError, SamplingParams
from runtime.text import TextError, Tokenizer

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


def prompts_with_params(prompts: Prompt | Iterable[Prompt], params: Params) -> list[tuple[Any, SamplingParams]]:
    """Each prompt with its parameters; what is in it is for ``token_ids`` to say. Raises TypeError or ValueError."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping) or _is_token(prompts):
        raise TypeError(f"prompts: expected a text, token ids, or several of either, got {prompts!r}")
    given: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if given and _is_token(given[0]):
        given = [given]  # one prompt alone
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(given)
    elif not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise TypeError(f"params: expected SamplingParams or a list of them, one per prompt, got {params!r}")
    elif len(params) != len(given):
        raise ValueError(f"params: expected one SamplingParams or one per prompt ({len(given)}), got {len(params)}")
    return list(zip(given, params, strict=True))


def token_ids(prompt: Prompt, tokenizer: Tokenizer | None, vocab: int, *, chat: bool) -> list[int]:
    """A prompt's tokens, below ``vocab``. chat: a text goes through the chat template. Raises RequestError."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("the prompt is text, and this engine has no tokenizer; give token ids")
        if not prompt:
            raise RequestError("the prompt is empty: at least one token is needed")
        try:
            prompt = tokenizer.chat(prompt) if chat else tokenizer.encode(prompt)
        except TextError as error:
            raise RequestError(str(error)) from error
    elif not isinstance(prompt, Iterable) or isinstance(prompt, Mapping) or getattr(prompt, "ndim", 1) == 0:
        raise RequestError(f"expected a text or token ids, got {prompt!r}")
    elif chat:
        raise RequestError("chat takes texts, got token ids")
    if type(prompt) in (list, tuple) and set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocab:
        return list(prompt)  # as nearly always, in a tenth of the time: steps wait meanwhile
    tokens = []
    for position, token in enumerate(prompt):
        if not _is_token(token):
            raise RequestError(f"prompt[{position}]: expected a token id, got {token!r}")
        number = int(token)
        if not 0 <= number < vocab:
            raise RequestError(f"prompt[{position}]: expected a token id from 0 to {vocab - 1}, got {number}")
        tokens.append(number)
    return tokens


def _is_token(value: Any) -> bool:
    """Integers of every kind: Python's, numpy's, one-element tensors; no truth values."""
    if isinstance(value, (bool, str)) or getattr(value, "ndim", 0) != 0:
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
