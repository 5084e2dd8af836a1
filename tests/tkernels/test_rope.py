"""rope and rope_and_cache against fp64: styles, QK-norm, pages and slots, fp8 caches, strides, offsets past 2**31, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import FP8, assert_as_exact_as_reference, assert_close_to_exact, column_slice, to_double

import tkernels
from tkernels import _repeats, _rope_kernels
from tkernels.rope import rope_and_cache_ref, rope_ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAGES, PAGE_SIZE = 4, 8
LAST = PAGES * PAGE_SIZE - 1


def _table(max_positions: int, rot_dim: int, device: torch.device) -> torch.Tensor:
    angles = torch.arange(max_positions)[:, None] * 10000.0 ** (-torch.arange(0, rot_dim, 2) / rot_dim)
    return torch.cat([angles.cos(), angles.sin()], -1).to(device)


def _qkv(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Views into one fused buffer with NaN columns around each, as a fused projection gives them (the strides differ from contiguous)."""
    parts = [column_slice(torch.randn(tokens, n * dim, device=device).to(dtype)) for n in (heads, kv_heads, kv_heads)]
    return tuple(x.unflatten(-1, (-1, dim)) for x in parts)


def _caches(kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device, interleaved: bool = False) -> list[torch.Tensor]:
    """k and v caches full of a pattern, separate or as two slices of one allocation."""
    if interleaved:
        both = torch.full((PAGES, PAGE_SIZE, kv_heads, 2, dim), 3.0, device=device).to(dtype)
        return [both[..., 0, :], both[..., 1, :]]
    return [torch.full((PAGES, PAGE_SIZE, kv_heads, dim), 3.0, device=device).to(dtype) for _ in "kv"]


def _compare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
             caches: list[torch.Tensor], slots: torch.Tensor, **kwargs: Any) -> None:  # fmt: skip
    """Run the op, the reference and the fp64 oracle on copies of the caches and compare q and both caches."""
    ours, low, exact = ([c.clone() for c in caches] for _ in range(3))
    untouched = (k.clone(), v.clone())
    q_out = tkernels.rope_and_cache(q, k, v, positions, cos_sin, *ours, slots, **kwargs)
    q_low = rope_and_cache_ref(q, k, v, positions, cos_sin, *low, slots, **kwargs)
    exact = [c.double() for c in exact]
    wide = {name: to_double(value) for name, value in kwargs.items()}
    q_exact = rope_and_cache_ref(*map(to_double, (q, k, v)), positions, cos_sin.double(), *exact, slots, **wide)
    assert_close_to_exact(q_out, q_exact, q_low)
    assert q_out.is_contiguous()
    for got, near, want in zip(ours, low, exact, strict=True):
        if got.dtype == FP8:  # one code apart at most, where fp32 arithmetic lands on the other side of a tie
            codes = [c.view(torch.uint8).int() for c in (got, near)]
            assert (codes[0] - codes[1]).abs().max() <= 1
            assert (codes[0] != codes[1]).float().mean() < 0.01
        else:
            assert_close_to_exact(got.flatten(0, 1).flatten(1), want.flatten(0, 1).flatten(1), near.flatten(0, 1).flatten(1))
        unwritten = torch.ones(PAGES * PAGE_SIZE, dtype=torch.bool, device=got.device)
        unwritten[slots[(slots >= 0) & (slots <= LAST)]] = False
        assert bool((got.float().flatten(0, 1)[unwritten] == 3.0).all()), "a slot that is not in slot_mapping was written"
    for x, before in zip((k, v), untouched, strict=True):
        torch.testing.assert_close(x, before, rtol=0, atol=0)


# (heads, kv_heads, head_dim, rot_dim): ratios 1, 3, 5, 7, 8; dims that are no powers of two; partial and odd remainders
SHAPES = [
    (4, 4, 64, 64),
    (9, 3, 64, 64),
    (5, 1, 80, 32),
    (7, 1, 96, 96),
    (8, 1, 128, 64),
    (2, 2, 5, 4),
    (3, 1, 7, 2),
    (2, 1, 256, 256),
    (40, 8, 16, 16),
]


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_styles(shape: tuple[int, ...], interleaved: bool, device: torch.device) -> None:
    heads, kv_heads, dim, rot_dim = shape
    for dtype in DTYPES if dim in (5, 80) else DTYPES[2 * interleaved :: 3]:
        q, k, v = _qkv(4, heads, kv_heads, dim, dtype, device)
        positions = torch.tensor([0, 1, 30, 31], device=device)
        cos_sin = _table(32, rot_dim, device)
        slots = torch.tensor([PAGE_SIZE - 1, PAGE_SIZE, -1, LAST], device=device)
        _compare(q, k, v, positions, cos_sin, _caches(kv_heads, dim, dtype, device), slots, interleaved=interleaved)
        for got, want in zip(tkernels.rope(q, k, positions, cos_sin, interleaved=interleaved), (q, k), strict=True):
            assert_as_exact_as_reference(got, lambda x, p, c: rope_ref(x, x, p, c, interleaved)[0], want, positions, cos_sin)


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize("shape", [(4, 2, 64, 64), (3, 1, 80, 32), (2, 1, 7, 4)], ids=str)
def test_qk_norm(shape: tuple[int, ...], interleaved: bool, device: torch.device) -> None:
    """Over the whole head_dim, also its unrotated rest; either weight may be missing; a zero row stays zero."""
    heads, kv_heads, dim, rot_dim = shape
    for dtype in DTYPES:
        q, k, v = _qkv(3, heads, kv_heads, dim, dtype, device)
        q[0] = 0
        q_weight, k_weight = torch.randn(dim, device=device).to(dtype), torch.randn(dim, device=device).to(dtype)
        positions, slots = torch.tensor([3, 5, 7], device=device), torch.tensor([0, 9, 17], device=device)
        both = {"q_weight": q_weight, "k_weight": k_weight}
        for weights in (both, {"q_weight": q_weight}, {"k_weight": k_weight}) if dim == 7 else (both,):
            caches = _caches(kv_heads, dim, dtype, device)
            _compare(q, k, v, positions, _table(8, rot_dim, device), caches, slots, interleaved=interleaved, eps=1e-5, **weights)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_b075_negative_slots_write_nothing(cache_dtype: torch.dtype, device: torch.device) -> None:
    """Slots [3, −1, −1] and one past the cache: the last slot of the last page keeps its pattern, in kernel and reference."""
    q, k, v = _qkv(4, 4, 2, 16, torch.float32, device)
    k[1:], v[1:] = float("nan"), float("nan")  # padding rows may hold anything
    slots = torch.tensor([3, -1, -(2**40), PAGES * PAGE_SIZE], device=device)
    positions, cos_sin = torch.zeros(4, dtype=torch.int64, device=device), _table(4, 16, device)
    for function in (tkernels.rope_and_cache, rope_and_cache_ref):
        caches = _caches(2, 16, cache_dtype, device)
        function(q, k, v, positions, cos_sin, *caches, slots)
        for cache in caches:
            flat = cache.float().flatten(0, 1)
            assert bool((flat[[i for i in range(LAST + 1) if i != 3]] == 3.0).all())
            assert not bool((flat[3] == 3.0).all())


@pytest.mark.parametrize("tokens", [0, 1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, LAST + 1])
def test_consecutive_slots_fill_pages(tokens: int, device: torch.device) -> None:
    """Page boundaries ±1, up to the last slot of the last page."""
    q, k, v = _qkv(tokens, 2, 1, 16, torch.float32, device)
    slots = torch.arange(LAST + 1 - tokens, LAST + 1, device=device)
    _compare(q, k, v, torch.arange(tokens, device=device), _table(64, 16, device), _caches(1, 16, torch.float32, device), slots)


@pytest.mark.parametrize("page_size", [1, 3, 8, 256])
def test_page_sizes(page_size: int, device: torch.device) -> None:
    q, k, v = _qkv(3, 2, 1, 8, torch.float32, device)
    caches = [torch.zeros(3, page_size, 1, 8, device=device) for _ in "kv"]
    slots = torch.tensor([0, page_size, 3 * page_size - 1], device=device)
    tkernels.rope_and_cache(q, k, v, torch.arange(3, device=device), _table(4, 8, device), *caches, slots)
    torch.testing.assert_close(caches[1][[0, 1, 2], [0, 0, page_size - 1]], v, rtol=0, atol=0)


def test_interleaved_allocation_and_permuted_caches(device: torch.device) -> None:
    """k and v as slices of one tensor; heads before slots within a page."""
    q, k, v = _qkv(3, 4, 2, 16, torch.float32, device)
    positions, cos_sin, slots = torch.arange(3, device=device), _table(4, 16, device), torch.tensor([5, 8, 31], device=device)
    want = _caches(2, 16, torch.float32, device)
    q_want = tkernels.rope_and_cache(q, k, v, positions, cos_sin, *want, slots)
    heads_first = [torch.full((PAGES, 2, PAGE_SIZE, 16), 3.0, device=device).transpose(1, 2) for _ in "kv"]
    for caches in (_caches(2, 16, torch.float32, device, interleaved=True), heads_first):
        q_got = tkernels.rope_and_cache(q, k, v, positions, cos_sin, *caches, slots)
        assert torch.equal(q_got, q_want)
        for got, expected in zip(caches, want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("scales", ["none", "one", "zero-dim", "per head"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
def test_b105_fp8_cache_holds_value_over_scale(scales: str, interleaved: bool, device: torch.device) -> None:
    """Unequal scales that are not 1, so that a swapped, inverted or forgotten one shows."""
    q, k, v = _qkv(4, 4, 2, 16, torch.bfloat16, device)
    kwargs: dict[str, Any] = {"interleaved": interleaved}
    if scales != "none":
        k_scale, v_scale = torch.tensor([0.5, 0.25], device=device), torch.tensor([4.0, 1.7], device=device)
        kwargs |= {
            "one": {"k_scale": k_scale[:1], "v_scale": v_scale[:1]},
            "zero-dim": {"k_scale": k_scale[0], "v_scale": v_scale[0]},
            "per head": {"k_scale": k_scale, "v_scale": v_scale},
        }[scales]
    slots = torch.tensor([0, 7, 8, -1], device=device)
    _compare(q, k, v, torch.arange(4, device=device), _table(4, 12, device), _caches(2, 16, FP8, device), slots, **kwargs)


def test_scales_apply_to_a_wide_cache_too(device: torch.device) -> None:
    """The reader multiplies by the scale whatever the dtype, so the writer divides whatever the dtype."""
    q, k, v = _qkv(2, 2, 1, 16, torch.float32, device)
    caches = _caches(1, 16, torch.float32, device)
    scales = {"k_scale": torch.tensor([0.5], device=device), "v_scale": torch.tensor([4.0], device=device)}
    slots = torch.tensor([0, 1], device=device)
    tkernels.rope_and_cache(q, k, v, torch.zeros(2, dtype=torch.int64, device=device), _table(1, 16, device), *caches, slots, **scales)
    torch.testing.assert_close(caches[0][0, :2], k / 0.5)
    torch.testing.assert_close(caches[1][0, :2], v / 4)


def test_b103_fp8_cache_saturates(device: torch.device) -> None:
    """Position 0 does not rotate, so the values reach the cache as they are. Infinities saturate too."""
    v = torch.tensor([448.0, 449, 464, 465, 480, 1e4, float("inf"), -float("inf")], device=device).reshape(1, 1, 8)
    k, q = v.clone(), torch.zeros_like(v)
    k[..., 4:] = 1e30  # partners of the rotation: x1 · cos − x2 · sin with sin 0, and infinity · 0 would be NaN
    position = torch.zeros(1, dtype=torch.int64, device=device)
    for function in (tkernels.rope_and_cache, rope_and_cache_ref):
        caches = [torch.zeros(1, 1, 1, 8, device=device).to(FP8) for _ in "kv"]
        function(q, k, v, position, _table(1, 8, device), *caches, position)
        assert caches[0].float().flatten().tolist() == [448.0] * 8
        assert caches[1].float().flatten().tolist() == [448.0] * 7 + [-448.0]


def test_positions_outside_the_table_give_nan(device: torch.device) -> None:
    q, k, _ = _qkv(4, 2, 1, 8, torch.float32, device)
    positions = torch.tensor([-1, 0, 3, 4], device=device)
    for function in (tkernels.rope, rope_ref):
        for x in function(q, k, positions, _table(4, 8, device)):
            assert x.isnan().flatten(1).all(1).tolist() == [True, False, False, True]
            assert not bool(x[1:3].isnan().any())


def test_row_does_not_depend_on_the_batch(device: torch.device) -> None:
    q, k, v = _qkv(9, 4, 2, 64, torch.bfloat16, device)
    weight = torch.randn(64, device=device)
    positions, cos_sin, slots = torch.arange(9, device=device), _table(16, 64, device), torch.arange(9, device=device)
    whole, alone = _caches(2, 64, torch.bfloat16, device), _caches(2, 64, torch.bfloat16, device)
    q_whole = tkernels.rope_and_cache(q, k, v, positions, cos_sin, *whole, slots, q_weight=weight, k_weight=weight)
    for i in (0, 4, 8):
        args = (x[i : i + 1] for x in (q, k, v, positions))
        one = tkernels.rope_and_cache(*args, cos_sin, *alone, slots[i : i + 1], q_weight=weight, k_weight=weight)
        assert torch.equal(one[0], q_whole[i])
        for a, w in zip(alone, whole, strict=True):
            assert torch.equal(a.flatten(0, 1)[i], w.flatten(0, 1)[i])


def test_bits_do_not_depend_on_how_many_heads_a_program_takes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for each block of heads where tokens are few, one for all heads of a token where they are many."""
    q, k, v = _qkv(3, 9, 5, 300, torch.float32, device)  # blocks of 2 heads: 5 and 3
    positions, slots, cos_sin = torch.tensor([3, 5, 7], device=device), torch.tensor([0, 9, 17], device=device), _table(8, 64, device)
    results = []
    for programs in (1024, 0):
        monkeypatch.setattr(_rope_kernels, "_PROGRAMS", programs)
        _repeats.forget()
        caches = _caches(5, 300, torch.float32, device)
        results.append((tkernels.rope_and_cache(q, k, v, positions, cos_sin, *caches, slots), *caches))
    for few, many in zip(*results, strict=True):
        assert torch.equal(few, many)


def test_no_heads_left_after_a_split(device: torch.device) -> None:
    empty, k = torch.empty(2, 0, 8, device=device), torch.randn(2, 1, 8, device=device)
    positions, cos_sin = torch.arange(2, device=device), _table(2, 8, device)
    assert tkernels.rope(empty, k, positions, cos_sin)[0].shape == (2, 0, 8)
    assert tkernels.rope(k, empty, positions, cos_sin)[1].shape == (2, 0, 8)
    caches = [torch.empty(1, 4, 0, 8, device=device) for _ in "kv"]
    assert tkernels.rope_and_cache(k, empty, empty, positions, cos_sin, *caches, positions).shape == k.shape


def test_b098_pages_past_32_bits(device: torch.device) -> None:
    """Page 2 starts 2**31 elements into the cache. On the CPU memory that is never touched is never allocated."""
    q, k, v = _qkv(2, 1, 1, 8, torch.float32, device)
    bases = [torch.empty(2**31 + 64, dtype=FP8, device=device) for _ in "kv"]
    caches = [b.as_strided((3, 2, 1, 8), (2**30, 8, 8, 1)) for b in bases]
    near = [torch.zeros(3, 2, 1, 8, device=device).to(FP8) for _ in "kv"]
    slots, positions = torch.tensor([4, 5], device=device), torch.arange(2, device=device)
    for pair in (caches, near):
        tkernels.rope_and_cache(q, k, v, positions, _table(2, 8, device), *pair, slots)
    for far, want in zip(caches, near, strict=True):
        assert torch.equal(far[2].float(), want[2].float())


def test_b101_token_stride_past_32_bits(device: torch.device) -> None:
    """Views into a fused buffer whose rows are 2**30 elements apart; token 2 starts at 2**31."""
    base = torch.empty(2**31 + 256, dtype=torch.float16, device=device)
    rows = base.as_strided((3, 32), (2**30, 1))
    rows.copy_(torch.randn(3, 32, device=device))
    q, k, v = (x.unflatten(-1, (-1, 8)) for x in rows.split([16, 8, 8], -1))
    positions, cos_sin, slots = torch.arange(3, device=device), _table(4, 8, device), torch.tensor([0, 1, 2], device=device)
    results = []
    for args in ((q, k, v), tuple(x.contiguous() for x in (q, k, v))):
        caches = _caches(1, 8, torch.float16, device)
        results.append([tkernels.rope_and_cache(*args, positions, cos_sin, *caches, slots), *caches])
    for far, near in zip(*results, strict=True):
        assert torch.equal(far, near)


@pytest.mark.gpu
def test_b098_highest_pages_of_a_large_cache(device: torch.device) -> None:
    """2.2e9 elements a cache, all of it real memory: the highest pages equal the lowest."""
    pages = 2**31 // (16 * 8 * 128) + 64
    caches = [torch.zeros(pages, 16, 8, 128, dtype=FP8, device=device) for _ in "kv"]
    q, k, v = (torch.randn(1, n, 128, device=device).bfloat16().expand(2, -1, -1) for n in (32, 8, 8))
    slots = torch.tensor([5, (pages - 1) * 16 + 5], device=device)
    tkernels.rope_and_cache(q, k, v, torch.ones(2, dtype=torch.int64, device=device), _table(2, 128, device), *caches, slots)
    for cache in caches:
        assert torch.equal(cache[0].view(torch.uint8), cache[-1].view(torch.uint8))
        assert bool(cache[0, 5].float().any())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": lambda x: x[0]}, ValueError, r"q: expected \[tokens, heads, head_dim\]"),
        ({"k": lambda x: x[:1]}, ValueError, r"k: expected \[2, heads, 8\] \(tokens and head_dim of q\), got \[1, 1, 8\]"),
        ({"v": lambda x: x.half()}, TypeError, "v: expected float32 like q"),
        ({"positions": lambda x: x.int()}, TypeError, "positions: expected int64 indices, got"),
        ({"positions": lambda x: x[:1]}, ValueError, r"positions: expected \[2\] one per token of q, got \[1\]"),
        ({"cos_sin": lambda x: x[:, :3]}, ValueError, "cos_sin: expected .* rot_dim even"),
        ({"cos_sin": lambda x: x.half()}, TypeError, "cos_sin: expected float32"),
        ({"slot_mapping": lambda x: x.int()}, TypeError, "slot_mapping: expected int64"),
        ({"k_cache": lambda x: x[0]}, ValueError, r"k_cache: expected \[pages, page_size, 1, 8\]"),
        ({"v_cache": lambda x: x[:1]}, ValueError, r"v_cache: expected \[4, 8, 1, 8\] like k_cache, got \[1, 8, 1, 8\]"),
        ({"k_cache": lambda x: x.int()}, TypeError, "k_cache: expected float16, bfloat16, float32 or float8_e4m3fn"),
        ({"q_weight": lambda _: torch.ones(7)}, ValueError, r"q_weight: expected \[8\] \(head_dim\), got \[7\]"),
        ({"k_scale": lambda _: torch.ones(3)}, ValueError, r"k_scale: expected one element or \[1\]"),
        ({"k_scale": lambda _: torch.ones(1).half()}, TypeError, "k_scale: expected float32"),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], error: type[Exception], message: str, device: torch.device) -> None:
    q, k, v = _qkv(2, 2, 1, 8, torch.float32, device)
    caches, numbers = _caches(1, 8, torch.float32, device), torch.arange(2, device=device)
    kwargs: dict[str, Any] = {
        "q": q, "k": k, "v": v, "positions": numbers, "cos_sin": _table(4, 8, device),
        "k_cache": caches[0], "v_cache": caches[1], "slot_mapping": numbers,
    }  # fmt: skip
    for name, edit in change.items():
        kwargs[name] = edit(kwargs.get(name)).to(device)
    with pytest.raises(error, match=message):
        tkernels.rope_and_cache(**kwargs)


def test_compiled_write_reaches_the_cache(device: torch.device) -> None:
    """In one graph with a reader behind it: the declared mutation orders the two."""
    q, k, v = _qkv(2, 2, 1, 8, torch.float32, device)
    positions, cos_sin, slots = torch.arange(2, device=device), _table(4, 8, device), torch.tensor([1, 9], device=device)
    caches, want = _caches(1, 8, torch.float32, device), _caches(1, 8, torch.float32, device)

    def step(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tkernels.rope_and_cache(q * 2, k, v, positions, cos_sin, k_cache, v_cache, slots), v_cache.sum()

    with torch.no_grad():
        got, expected = torch.compile(step, backend="aot_eager", fullgraph=True)(q, *caches), step(q, *want)
    for a, b in zip((*got, *caches), (*expected, *want), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
