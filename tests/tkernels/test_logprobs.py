"""top_logprobs against its oracle and torch, and at the edges."""

from __future__ import annotations

import pytest
import torch
from oracle import column_slice

import tkernels
from tkernels.logprobs import top_logprobs_ref

INF = float("inf")


@pytest.mark.parametrize(
    ("vocab", "n", "dtype"),
    [(1, 1, torch.float32), (7, 7, torch.bfloat16), (1000, 20, torch.float16), (4096, 0, torch.float32), (8200, 5, torch.bfloat16)],
)
def test_equals_the_oracle(vocab: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """bf16 puts many equals among the largest: the lower id comes first."""
    logits = column_slice((torch.randn(4, vocab, device=device) * 3).to(dtype))
    tokens = torch.tensor([0, vocab - 1, -1, vocab], device=device)
    chosen, ids, values = tkernels.top_logprobs(logits, tokens, n)
    want = top_logprobs_ref(logits, tokens, n)
    torch.testing.assert_close(chosen, want[0], rtol=2e-6, atol=2e-6)
    assert torch.equal(ids, want[1])
    torch.testing.assert_close(values, want[2], rtol=2e-6, atol=2e-6)
    assert chosen[2:].tolist() == [-INF, -INF]
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(values.double(), exact.gather(1, ids), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(chosen[:2].double(), exact[[0, 1], [0, vocab - 1]], rtol=1e-5, atol=1e-5)


def test_the_likeliest_are_in_few_runs_or_each_in_its_own(device: torch.device) -> None:
    """All in one run of 128 columns, one in each of as many, equals across runs, of which the lowest ids count; several tiles."""
    rows, vocab = 26, 5003
    logits = torch.randn(rows, vocab, device=device)
    logits[0, 4990:] += 50.0
    logits[1, 64::128] += 50.0
    logits[2] = 0.5
    logits[3, ::3] = 9.0
    logits[4] = -INF
    logits[4, [1, 130, 4999]] = 1.0
    tokens = torch.arange(rows, device=device) * 190
    for few, n in ((slice(0, 5), 32), (slice(0, rows), 2)):
        chosen, ids, values = tkernels.top_logprobs(logits[few], tokens[few], n)
        want = top_logprobs_ref(logits[few], tokens[few], n)
        torch.testing.assert_close(chosen, want[0], rtol=2e-6, atol=2e-6)
        assert torch.equal(ids, want[1])
        torch.testing.assert_close(values, want[2], rtol=2e-6, atol=2e-6)
    for got, alone in zip((chosen, ids, values), tkernels.top_logprobs(logits[:2], tokens[:2], 2), strict=True):
        assert torch.equal(got[:2], alone)


def test_b133_bad_rows_are_defined(device: torch.device) -> None:
    """NaN, nothing, infinities and huge logits, and good rows beside them."""
    logits = torch.randn(6, 300, device=device)
    logits[0] = float("nan")
    logits[1] = -INF
    logits[2, [5, 200]] = INF
    logits[3] = -INF
    logits[3, 7] = 2.0
    logits[4, 9] = 3e38
    tokens = torch.tensor([0, 0, 200, 7, 9, 1], device=device)
    chosen, ids, values = tkernels.top_logprobs(logits, tokens, 3)
    want = top_logprobs_ref(logits, tokens, 3)
    for got, expected in zip((chosen, ids, values), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert chosen[:2].tolist() == [-INF, -INF] and ids[:2].tolist() == [[0, 1, 2]] * 2
    assert ids[2, :2].tolist() == [5, 200] and values[2, 0] == values[2, 1] and values[2, 2] == -INF
    assert chosen[3:5].tolist() == [0.0, 0.0] and values[3, 1] == -INF
    alone = tkernels.top_logprobs(logits[5:], tokens[5:], 3)
    for got, single in zip((chosen, ids, values), alone, strict=True):
        assert torch.equal(got[5:], single)


def test_errors_name_the_argument(device: torch.device) -> None:
    logits, tokens = torch.zeros(2, 40, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for n in (-1, 33):
        with pytest.raises(ValueError, match="n: expected 0 to 32"):
            tkernels.top_logprobs(logits, tokens, n)
    with pytest.raises(ValueError, match="n: expected 0 to 4 "):
        tkernels.top_logprobs(logits[:, :4], tokens, 5)
    with pytest.raises(TypeError, match="tokens: expected int64 per row"):
        tkernels.top_logprobs(logits, tokens.int(), 5)
