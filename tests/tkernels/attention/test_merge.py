"""merge_attention."""

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


@pytest.mark.parametrize("states", [(), (3,)])
def test_merge_of_no_tokens_by_the_reference(states, device):
    out, lse = torch.empty(0, 3, 24, device=device), torch.empty(0, 3, device=device)
    with reference_ops():
        merged = tkernels.merge_attention(out, lse, out.expand(*states, 0, 3, 24), lse.expand(*states, 0, 3))
    assert [x.shape for x in merged] == [(0, 3, 24), (0, 3)]


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


@pytest.mark.parametrize(
    ("states", "dim", "dtype"),
    [(1, 24, torch.float16), (5, 72, torch.float16), (5, 24, torch.float32), (33, 130, torch.float32), (200, 4, torch.float32)],
)
def test_merge_of_many_states(states, dim, dtype, device):
    """Against the oracle, values in fp32 under an fp16 side, some sets and one whole row empty, states strided."""
    out_a, lse_a = torch.randn(5, 3, dim).to(device, dtype), torch.randn(5, 3).to(device) * 5
    lse_a[2] = float("-inf")
    out_b = torch.randn(5, states, 3, dim, device=device).transpose(0, 1)
    lse_b = (torch.randn(5, states, 3, device=device) * 5).transpose(0, 1)
    empty = torch.rand(states, 5, 3, device=device) < 0.3
    empty[:, 2] = True
    out_b[empty], lse_b[empty] = float("nan"), float("-inf")
    out_a[2] = float("nan")
    out, lse = tkernels.merge_attention(out_a, lse_a, out_b, lse_b)
    want, want_lse = merge_attention_ref(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    torch.testing.assert_close(out.double(), want, atol=4e-3 if dtype == torch.float16 else 4e-6, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-6)
    assert (out[2] == 0).all() and torch.isneginf(lse[2]).all()
    one_by_one = out_a.double(), lse_a.double()
    for state in range(states):
        one_by_one = merge_attention_ref(*one_by_one, out_b[state].double(), lse_b[state].double())
    torch.testing.assert_close(want, one_by_one[0])


def test_merge_refuses_states_that_do_not_fit(device):
    out_a, lse_a, out_b, lse_b = _sides(device)
    with pytest.raises(ValueError, match="out_b: expected 1 to 1024 states"):
        tkernels.merge_attention(out_a, lse_a, out_b[None][:0], lse_b[None][:0])
    with pytest.raises(ValueError, match=r"lse_b: expected \[2, 5, 3\]"):
        tkernels.merge_attention(out_a, lse_a, out_b.expand(2, -1, -1, -1), lse_b)
    with pytest.raises(TypeError, match="out_b: expected float32 like out_a, or float32"):
        tkernels.merge_attention(out_a, lse_a, out_b.half(), lse_b)
