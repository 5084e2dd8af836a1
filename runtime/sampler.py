"""Draws that ask for more than temperature, top-k and top-p: min-p, penalties, bias, masks; and log-probabilities.

The captured step draws every row plainly, so that a graph is the same whatever requests ask. Behind it, on the rows that ask for
more and on no others, these kernels adjust the logits and draw again. Nothing of this waits for the device, and a step in which no
request asks for more costs nothing. State lies on the device by request slot (the request's row in the block table), is set when a
request takes the slot, and is made when the first request needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

import tkernels
from runtime.outputs import Loan, taken
from runtime.request import Request, RequestError, SamplingParams, TokenLogprob
from runtime.scheduler import Chunk, Step

_MAX_BIAS = 1024  # entries of one request, as SamplingParams allows
_BIAS_WIDTHS = (32, _MAX_BIAS)  # of the entries that a step reads: each is a kernel of its own
_MOST_LOGPROBS = 20  # as SamplingParams allows


class Pending(NamedTuple):
    """Log-probabilities on their way to the host: of which requests, how many of the likeliest each wants, and the values."""

    wanted: list[tuple[int, int]]  # request number, count
    chosen: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor

    def read(self) -> dict[int, TokenLogprob]:
        """By request number. Call it once the copies have arrived."""
        rows = zip(self.wanted, self.chosen.tolist(), self.ids.tolist(), self.values.tolist(), strict=True)
        return {
            number: TokenLogprob(own, dict(zip(ids[:count], values[:count], strict=True))) for (number, count), own, ids, values in rows
        }


def pack_mask(words: Any, vocab: int, allowed: Sequence[int] | None = None) -> np.ndarray | None:
    """What a TokenMask gave, as int32 words, less what is not in ``allowed``; None for None. Raises ValueError or TypeError for anything
    that is no mask, or that leaves no token."""
    if words is None:
        return None
    packed = np.asarray(words)
    size = -(-vocab // 32)
    if packed.dtype not in (np.int32, np.uint32) or packed.size != size:
        raise ValueError(f"expected {size} packed int32 words for a vocabulary of {vocab}, got {packed.size} of {packed.dtype}")
    packed = packed.reshape(-1).view(np.uint32)
    if not packed[:-1].any() and not int(packed[-1]) & (0xFFFFFFFF >> (-vocab % 32)):
        raise ValueError("it allows no token at all")
    if allowed is not None:
        packed = packed & _pack_ids(allowed, vocab).view(np.uint32)
        if not packed.any():
            raise ValueError("it allows no token that allowed_token_ids has")
    return packed.view(np.int32)


def _pack_ids(ids: Sequence[int], vocab: int) -> np.ndarray:
    """The mask that allows these tokens."""
    packed = np.zeros(-(-vocab // 32), np.uint32)
    np.bitwise_or.at(packed, np.array(ids) // 32, np.uint32(1) << (np.array(ids) % 32).astype(np.uint32))
    return packed.view(np.int32)


class SlotSampler:
    """State of ``num_slots`` requests, and the draws that need it."""

    def __init__(self, vocab: int, num_slots: int, device: torch.device) -> None:
        self.vocab, self.num_slots, self.device = vocab, num_slots, device
        self._counts: torch.Tensor | None = None
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        self._mask: torch.Tensor | None = None
        self._allowed: dict[int, np.ndarray] = {}  # slot -> the mask of its allowed_token_ids

    def _send(self, array: np.ndarray) -> torch.Tensor:
        """To the device, without waiting for it."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def prepare(self, params: SamplingParams, has_mask: bool) -> None:
        """Make the state that such requests need, if it is not there. Raises RequestError where the device has no memory for it."""
        words = -(-self.vocab // 32)
        try:
            with torch.inference_mode(False):  # it is written in steps, which may be outside of inference mode
                if params.penalises and self._counts is None:
                    self._counts = torch.zeros((self.num_slots, self.vocab), dtype=torch.int32, device=self.device)
                if params.logit_bias and self._bias is None:
                    ids = torch.full((self.num_slots, _MAX_BIAS), -1, dtype=torch.int32, device=self.device)
                    self._bias = ids, torch.zeros(ids.shape, dtype=torch.float32, device=self.device)
                if (params.allowed_token_ids is not None or has_mask) and self._mask is None:
                    self._mask = torch.full((self.num_slots, words), -1, dtype=torch.int32, device=self.device)
        except torch.OutOfMemoryError as error:
            needed = self.num_slots * (4 * self.vocab if params.penalises else 8 * _MAX_BIAS if params.logit_bias else 4 * words)
            raise RequestError(
                f"its state for scheduler.max_num_seqs = {self.num_slots} requests takes {needed >> 20} MiB, which {self.device} does not "
                "have; lower cache.num_pages or scheduler.max_num_seqs"
            ) from error

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile every kernel that a request may ask for, so that the first one to ask does not stop all others in a step.

        dtype: of the logits. On a state of one slot, which is dropped again: that of all slots is made when it is needed.
        """
        own = SlotSampler(self.vocab, 1, self.device)
        logits = torch.zeros((2, self.vocab), dtype=dtype, device=self.device)
        for penalty, allowed, entries in product((0.0, 1.0), (None, (0,)), (0, *_BIAS_WIDTHS)):
            bias = dict.fromkeys(range(min(entries, self.vocab)), 0.0)
            params = SamplingParams(temperature=1.0, min_p=0.1, presence_penalty=penalty, allowed_token_ids=allowed, logit_bias=bias)
            request = Request(0, (0,), params)
            request.row = 0
            own.admit(request)
            own._draw([(0, Chunk(request, 0, 1, True, 0))], logits, {})
        assert own._counts is not None
        tokens = torch.zeros(4096, dtype=torch.int64, device=self.device)
        for length, prompt in product((1, 64, 128, 4096), (False, True)):  # a block for each power of two up to 256
            tkernels.count_tokens(own._counts, tokens[:length], tokens[:length], prompt=prompt)
        for count in range(min(_MOST_LOGPROBS, self.vocab) + 1):
            tkernels.top_logprobs(logits[:1], tokens[:1], count)

    def admit(self, request: Request) -> None:
        """A request has taken its row: set the state of that slot. Its tokens are all known then, also after a preemption."""
        params, slot = request.params, request.row
        self.prepare(params, request.mask is not None)
        if params.penalises:
            assert self._counts is not None
            self._counts[slot].zero_()
            said = self._send(np.array(request.tokens, np.int64))
            slots = torch.full_like(said, slot)
            split = request.num_prompt
            tkernels.count_tokens(self._counts, slots[:split], said[:split], prompt=True)
            tkernels.count_tokens(self._counts, slots[split:], said[split:])
        if self._bias is not None:
            entries = len(params.logit_bias)
            tokens, values = np.full(_MAX_BIAS, -1, np.int32), np.zeros(_MAX_BIAS, np.float32)
            tokens[:entries], values[:entries] = list(params.logit_bias), list(params.logit_bias.values())
            self._bias[0][slot].copy_(self._send(tokens))
            self._bias[1][slot].copy_(self._send(values))
        if self._mask is not None:
            self._allowed.pop(slot, None)
            if params.allowed_token_ids is None:
                self._mask[slot].fill_(-1)
            else:
                self._allowed[slot] = _pack_ids(params.allowed_token_ids, self.vocab)
                self._mask[slot].copy_(self._send(self._allowed[slot]))

    def run(
        self, step: Step, tokens: torch.Tensor, logits: torch.Tensor | Loan, masks: Mapping[int, np.ndarray]
    ) -> tuple[torch.Tensor, Pending | None]:
        """The step's tokens, those of rows that ask for more drawn again, and the log-probabilities that requests want.

        tokens [seqs], logits [seqs, vocab]: what the step gave. masks: by request number, what masks allow for this token.
        """
        logits = taken(logits)  # until the next step, which comes behind all this
        sampling = [(row, each[0]) for row, each in enumerate(step.rows) if each[3]]
        adjusted = [(row, Chunk._make(step.rows[row])) for row, request in sampling if request.adjusts]
        if adjusted:
            index, drawn = self._draw(adjusted, logits, masks)
            tokens = drawn if len(adjusted) == len(step.rows) else tokens.index_copy(0, index, drawn)
        wanted = [(row, each.number, each.params.logprobs) for row, each in sampling if each.params.logprobs is not None]
        if not wanted:
            return tokens, None
        index = self._send(np.array([row for row, _, _ in wanted]))
        most = min(max(count for _, _, count in wanted), self.vocab)
        found = tkernels.top_logprobs(logits.index_select(0, index), tokens.index_select(0, index), most)
        return tokens, Pending([(number, count) for _, number, count in wanted], *map(self._fetch, found))

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """To the host, without waiting: it is there once the step's event has passed."""
        if self.device.type == "cpu":
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def _draw(
        self, adjusted: list[tuple[int, Chunk]], logits: torch.Tensor, masks: Mapping[int, np.ndarray]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, their tokens)."""
        requests = [chunk.request for _, chunk in adjusted]
        params = [request.params for request in requests]
        count = len(adjusted)
        # All numbers in one buffer, so that they travel in one copy: four rows of int64, then seven of 32 bits.
        packed = np.empty(count * (4 * 8 + 7 * 4), np.uint8)
        wide, narrow = packed[: count * 32].view(np.int64).reshape(4, -1), packed[count * 32 :].view(np.float32).reshape(7, -1)
        wide[0] = [row for row, _ in adjusted]
        wide[1] = [request.row for request in requests]
        wide[2] = [request.seed for request in requests]
        wide[3] = [chunk.num_generated for _, chunk in adjusted]
        for i, name in enumerate(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")):
            narrow[i] = [getattr(each, name) for each in params]
        narrow[6].view(np.int32)[:] = [each.top_k for each in params]
        sent = self._send(packed)
        index, slots, seeds, draws = sent[: count * 32].view(torch.int64).view(4, -1)
        temperature, top_p, min_p, repetition, presence, frequency, top_k = sent[count * 32 :].view(torch.float32).view(7, -1)
        state: dict[str, torch.Tensor] = {}
        penalises = any(each.penalises for each in params)
        if penalises:
            assert self._counts is not None
            state |= {"counts": self._counts, "repetition": repetition, "presence": presence, "frequency": frequency}
        if width := max(len(each.logit_bias) for each in params):
            assert self._bias is not None
            width = next(each for each in _BIAS_WIDTHS if each >= width)
            state |= {"bias_ids": self._bias[0][:, :width], "bias_values": self._bias[1][:, :width]}
        self._take_masks(requests, masks)
        if any(request.mask is not None or request.params.allowed_token_ids is not None for request in requests):
            assert self._mask is not None
            state["mask"] = self._mask
        if count < len(logits):
            logits = logits.index_select(0, index)
        shaped = tkernels.adjust_logits(logits, slots=slots, **state)
        drawn = tkernels.sample(shaped, temperature, top_k.view(torch.int32), top_p, seeds, draws, min_p=min_p)
        if penalises:
            assert self._counts is not None
            tkernels.count_tokens(self._counts, slots, drawn)
        return index, drawn

    def _take_masks(self, requests: list[Request], masks: Mapping[int, np.ndarray]) -> None:
        """Put what the masks allow for this token into their slots."""
        given = [(request.row, masks.get(request.number)) for request in requests if request.mask is not None]
        if not given:
            return
        assert self._mask is not None
        rows = np.full((len(given), self._mask.shape[1]), -1, np.int32)
        for row, (slot, words) in zip(rows, given, strict=True):
            if words is not None:
                row &= words
            if slot in self._allowed:
                row &= self._allowed[slot]
        self._mask.index_copy_(0, self._send(np.array([slot for slot, _ in given])), self._send(rows))
