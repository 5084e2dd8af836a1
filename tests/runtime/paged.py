"""Drives a ``CausalLM`` the way an engine does, without one: packed steps over permuted pages of a poisoned cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.model import CausalLM, allocate_cache


class PagedModel:
    """Sequences by name, each with the tokens it has had. ``step`` runs any mixture of chunks and decode tokens at once.

    Pages are handed out in a shuffled order; page 0 and all unwritten slots hold NaN. ``rows`` picks the logits, default all.
    ``run`` is what is called, the model unless a test puts a compiled one there.
    """

    def __init__(self, model: CausalLM, *, num_pages: int = 64, page_size: int = 4, max_pages: int = 32, dtype: str = "auto") -> None:
        self.model, self.page_size, self.max_pages = model, page_size, max_pages
        self.run: Callable[..., torch.Tensor] = model
        self.rows: list[int] | None = None
        self.device = model.embed_tokens.device
        self._pairs = allocate_cache(model.spec, num_pages, page_size, dtype, self.device)
        self.caches = [cache for pair in self._pairs for cache in pair]
        for cache in self.caches:
            cache.fill_(float("nan"))
        self.free = (torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
        self.pages: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(
        self, new: dict[str, list[int]], *, pad_tokens: int = 0, pad_seqs: int = 0, max_query_len: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Feed ``new[name]`` to each sequence; returns the logits [new tokens, vocab] of every token, by sequence."""
        self.model.bind_cache(self._pairs)  # each time, so that two of these can share a model
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, tokens in new.items():
            pages, start = self.pages.setdefault(name, []), self.lengths.get(name, 0)
            for position in range(start, start + len(tokens)):
                if position // self.page_size == len(pages):
                    pages.append(self.free.pop())
                slots.append(pages[position // self.page_size] * self.page_size + position % self.page_size)
                positions.append(position)
            ids += tokens
            starts.append(len(ids))
            self.lengths[name] = start + len(tokens)
        table = [self.pages[name] + [-1] * (self.max_pages - len(self.pages[name])) for name in new] + [[-1] * self.max_pages] * pad_seqs
        lens = [self.lengths[name] for name in new] + [0] * pad_seqs
        longest = max((len(tokens) for tokens in new.values()), default=0)
        self.last_logits = self.run(
            self._tensor(ids + [0] * pad_tokens, torch.int64),
            self._tensor(positions + [0] * pad_tokens, torch.int64),
            self._tensor(slots + [-1] * pad_tokens, torch.int64),
            self._tensor(table, torch.int32).reshape(-1, self.max_pages),
            self._tensor(lens, torch.int32),
            self._tensor(starts + [starts[-1]] * pad_seqs, torch.int32),
            self._tensor(list(range(len(ids))) if self.rows is None else self.rows, torch.int64),
            longest if max_query_len is None else max_query_len,
        )
        if self.rows is not None:
            return {}
        parts = self.last_logits.split([len(tokens) for tokens in new.values()]) if new else []
        return dict(zip(new, parts, strict=True))

    def _tensor(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
