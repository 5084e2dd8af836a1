"""merge_attention and cascade_attention."""

from __future__ import annotations

import pytest
import torch

import tkernels
from tests.tkernels.attention.cases import check, make_case
from tkernels._op import reference_ops
from tkernels.attention.ref import merge_attention_ref, paged_attention_ref


def _sides(device: torch.device, dtype: torch.dtype = torch.float32):
    out_a, out_b = (torch.randn(5, 3, 24).to(device, dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(5, 3).to(device) * 30 for _ in range(2))
    lse_a[0], lse_b[1] = float("-inf"), float("-inf")
    lse_a[2], lse_b[2] = float("-inf"), float("-inf")
    out_a[0], out_b[1], out_a[2], out_b[2] = (float("nan") for _ in range(4))  # an empty side may hold anything
    return out_a, lse_a, out_b, lse_b


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_merge_against_the_oracle(dtype, tolerance, device):
    out_a, lse_a, out_b, lse_b = _sides(device, dtype)
    out, lse = tkernels.merge_attention(out_a, lse_a, out_b, lse_b)
    want, want_lse = merge_attention_ref(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    torch.testing.assert_close(out.double(), want, atol=tolerance * 4, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-6)
    assert (out[2] == 0).all() and torch.isneginf(lse[2]).all()


def test_merge_of_two_halves_is_attention_over_the_whole(device):
    """The oracle of the merge is itself right: attention over the first pages and over the rest, merged."""
    case = make_case([40], [1], heads=4, kv_heads=2, dim=16, page_size=8, poison=False)
    table, starts, scale = case.block_table, case.cu_seqlens_q, case.keywords["scale"]
    first = paged_attention_ref(
        case.q, case.k_cache, case.v_cache, table[:, :2], torch.tensor([16], dtype=torch.int32), starts, scale=scale
    )
    rest = paged_attention_ref(case.q, case.k_cache, case.v_cache, table[:, 2:], torch.tensor([24], dtype=torch.int32), starts, scale=scale)
    out, lse = tkernels.merge_attention(*(t.to(device) for t in (*first, *rest)))
    check(case, out, lse)


def test_merge_opcheck_and_errors(device):
    sides = _sides(device)
    with reference_ops():
        torch.library.opcheck(torch.ops.tkernels.merge_attention.default, sides)
    out_a, lse_a, out_b, lse_b = sides
    with pytest.raises(ValueError, match="out_b: expected"):
        tkernels.merge_attention(out_a, lse_a, out_b[:4], lse_b)
    with pytest.raises(TypeError, match="lse_a: expected float32"):
        tkernels.merge_attention(out_a, lse_a.half(), out_b, lse_b)
    empty = tkernels.merge_attention(out_a[:0], lse_a[:0], out_b[:0], lse_b[:0])
    assert empty[0].shape == (0, 3, 24)


@pytest.mark.parametrize("sinks", [False, True])
def test_cascade_equals_attention_without_it(sinks, device):
    """Decode, several tokens, a padding row and rows past the end, over a prefix of 20 tokens: 2 whole pages and a half."""
    shared, lens = 24, [5, 9, 0, 1]
    keywords = {"sinks": torch.randn(4, device=device)} if sinks else {}
    case = make_case(
        [n + shared if n else 0 for n in lens], [1, 3, 1, 1], dim=16, page_size=8, extra_rows=2, poison=False, device=device, **keywords
    )  # fmt: skip
    case.block_table[:, :3] = case.block_table[0, :3]
    own = case.block_table[:, 3:].contiguous()
    out, lse = tkernels.cascade_attention(
        case.q, case.k_cache, case.v_cache, case.block_table[0, :3], torch.tensor([shared], dtype=torch.int32, device=device), own,
        torch.tensor(lens, dtype=torch.int32, device=device), case.cu_seqlens_q, return_lse=True, **case.keywords,
    )  # fmt: skip
    check(case, out, lse)


def test_cascade_errors(device):
    case = make_case([9], [1], dim=16, device=device)
    q, k, v, table, lens, starts = case.tensors
    with pytest.raises(ValueError, match="shared_block_table: expected"):
        tkernels.cascade_attention(q, k, v, table.repeat(2, 1), lens, table, lens, starts, **case.keywords)
    with pytest.raises(ValueError, match=r"shared_len: expected \[1\]"):
        tkernels.cascade_attention(q, k, v, table, lens.repeat(2), table, lens, starts, **case.keywords)
