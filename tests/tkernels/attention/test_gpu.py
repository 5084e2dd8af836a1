"""What only a GPU can show: captured graphs over every length, bits in bf16, many repeats, compilations after warm-up, big caches."""

from __future__ import annotations

import pytest
import torch

import tkernels
from tests.tkernels.attention.cases import Case, check, check_far_pages, make_case
from tests.tkernels.attention.test_batches import part
from tests.tkernels.attention.test_values import attend
from tests.tkernels.captured import captured
from tkernels.attention import prefill_sm90
from tkernels.attention.ref import paged_attention_ref

pytestmark = pytest.mark.gpu

SHAPE = {"heads": 32, "kv_heads": 8, "dim": 128, "page_size": 16, "dtype": torch.bfloat16, "device": "cuda"}


def test_b018_b033_one_graph_serves_every_length_after_a_larger_call():
    """Captured at length 1; then a call that needs more workspace, whose freed memory is filled with NaN; then every kind of length."""
    case = make_case([4096] * 8, [1] * 8, poison=False, **SHAPE)
    out, lse = torch.empty_like(case.q), torch.empty(8, 32, device="cuda")
    lens = case.seq_lens.clone()
    case.seq_lens.fill_(1)

    def call() -> None:
        tkernels.paged_attention_out(*case.tensors, **case.keywords, out=out, lse=lse)

    graph, _ = captured(call)
    bigger = make_case([4096] * 64, [8] * 64, poison=False, **SHAPE)
    attend(bigger)
    torch.full((1 << 28,), float("nan"), device="cuda")
    for new in ([1] * 8, [4096] * 8, [0, 1, 15, 16, 17, 63, 64, 65], [4095, 0, 2048, 1, 1023, 1024, 1025, 4096], lens.tolist()):
        case.seq_lens.copy_(torch.tensor(new, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        replayed, replayed_lse = out.clone(), lse.clone()
        call()
        assert torch.equal(replayed, out) and torch.equal(replayed_lse, lse)
        check(case, replayed, replayed_lse)


@pytest.mark.parametrize(
    "shape", [{"dim": 128}, {"dim": 256}, {"dim": 128, "dtype": torch.float8_e4m3fn}, {"dim": 128, "page_size": 24}], ids=str
)  # 256: a Gluon kernel for few tokens, the plain one for up to 8; e4m3: none for prompts under fp16 queries; pages of 24: none, and two
# launches for prompts
@pytest.mark.parametrize("queries", [[1] * 20 + [3, 8], [1] * 20 + [3, 8, 300, 40], [1] * 40 + [2000], [5] * 20])
@pytest.mark.parametrize("dependent", [False, True])
def test_launches_of_a_set_begin_after_what_stands_before_and_end_before_what_stands_after(
    dependent: bool, queries: list[int], shape: dict
):
    """Their inputs are written right before and overwritten right after; what follows reads their output at once."""
    case = make_case([q + 50 * i for i, q in enumerate(queries)], queries, poison=False, **SHAPE | shape)
    expected, _ = attend(case)
    check(case, expected)
    inputs = [case.q, case.k_cache, case.v_cache]
    golden = [x.clone() for x in inputs]
    out, seen, weight = torch.empty_like(case.q), torch.empty_like(case.q), torch.ones(shape["dim"], dtype=case.q.dtype, device="cuda")

    def call() -> None:
        for x, given in zip(inputs, golden, strict=True):
            x.copy_(given)
        tkernels.paged_attention_out(*case.tensors, **case.keywords, out=out)
        seen.copy_(tkernels.rms_norm(out, weight))
        for x in (*inputs, out):
            x.fill_(float("nan"))

    graph, _ = captured(call, dependent)
    normed = tkernels.rms_norm(expected, weight)
    for again in [graph.replay] * 30 + [call] * 5:
        seen.zero_()
        again()
        assert torch.equal(seen, normed)


def bits_alone_and_in_a_batch(query_lens, **shape) -> tuple[Case, torch.Tensor]:
    lens = [max(q, int(n)) for q, n in zip(query_lens, torch.randint(1, 5000, (len(query_lens),)), strict=True)]
    case = make_case(lens, query_lens, **{**SHAPE, **shape})
    out, lse = attend(case)
    check(case, out, lse)
    starts = case.cu_seqlens_q.tolist()
    for s in range(len(query_lens)):
        rows = slice(starts[s], starts[s + 1])
        alone, alone_lse = attend(part(case, s, s + 1))
        assert torch.equal(alone, out[rows]) and torch.equal(alone_lse, lse[rows]), f"sequence {s}"
    return case, out


@pytest.mark.parametrize("dim", [64, 96, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_bits_of_every_table_entry(dim, dtype):
    """Alone a row takes the entry for one token, few sequences and 8 columns of tensor cores; here those for several, many and up to 32."""
    bits_alone_and_in_a_batch([1, 4, 8, 2, 1] * 8, dim=dim, dtype=dtype)
    bits_alone_and_in_a_batch([1] * 50, dim=dim, dtype=dtype)


@pytest.mark.parametrize("dim", [64, 128])
def test_fp8_cache_under_fp32_queries(dim):
    case = make_case([1000, 33, 0, 700, 129, 2000], [1, 4, 1, 8, 2, 300], **{**SHAPE, "dim": dim, "dtype": torch.float8_e4m3fn})
    case.q = case.q.float()
    check(case, *attend(case))


@pytest.mark.parametrize("query_lens", [[1] * 24, [1, 4, 8, 2] * 6, [1, 3, 200, 1, 9, 64] * 4], ids=["decode", "several", "mixed"])
def test_bits_alone_and_in_a_batch(query_lens):
    case, out = bits_alone_and_in_a_batch(query_lens)
    for _ in range(1000):
        again, _ = attend(case)
        assert torch.equal(again, out)


@pytest.mark.parametrize("dim", [36, 40, 64, 72, 80, 96, 128, 136, 192, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 7, 8, 16])
def test_shapes_in_bf16(dim, group):
    case = make_case(
        [1000, 33, 0, 700, 129, 2000], [1, 1, 1, 5, 129, 300], heads=2 * group, kv_heads=2, dim=dim, page_size=16,
        dtype=torch.bfloat16, device="cuda", extra_rows=3,
    )  # fmt: skip
    check(case, *attend(case))


@pytest.mark.parametrize(
    "keywords",
    [{"window": 100}, {"softcap": 5.0}, {"causal": False}, {"sinks": True}, {"window": 500, "softcap": 5.0, "sinks": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_features(keywords, dtype):
    keywords = dict(keywords)
    if keywords.pop("sinks", False):
        keywords["sinks"] = torch.randn(32, device="cuda")
    if dtype == torch.float8_e4m3fn:
        keywords |= {"k_scale": 0.5, "v_scale": torch.rand(8, device="cuda") + 0.5}
    case = make_case([1000, 33, 0, 700, 2000], [1, 1, 1, 5, 300], extra_rows=3, **{**SHAPE, "dtype": dtype}, **keywords)
    check(case, *attend(case))


@pytest.mark.parametrize(
    "shape",
    [
        {}, {"page_size": 64}, {"page_size": 256}, {"page_size": 24}, {"dim": 64}, {"dim": 80}, {"dim": 256}, {"heads": 56},
        {"window": 100}, {"window": 300, "softcap": 5.0}, {"causal": False}, {"dtype": torch.float8_e4m3fn},
        {"dtype": torch.float8_e4m3fn, "window": 100}, {"dtype": torch.float32},
    ],
    ids=str,
)  # fmt: skip
def test_prompts_by_the_plain_kernel(shape):
    """One to many blocks of keys in its pipelined loop, where triton 3.6 has read the pages of the first one again and again; alone and in
    a batch the bits are the same, and in chunks with keys of 16 bits."""
    query_lens = [9, 127, 128, 129, 256, 385, 512, 2000]
    shape = {**SHAPE, **shape}
    prefill_sm90.enable(False)
    try:
        case = make_case([n + 3 * (n % 2) for n in query_lens], query_lens, **shape)
        out, lse = attend(case)
        check(case, out, lse)
        for s in range(len(query_lens)):
            alone, _ = attend(part(case, s, s + 1))
            rows = slice(*case.cu_seqlens_q[s : s + 2].tolist())
            assert torch.equal(alone, out[rows]), f"sequence {s}"
        if case.keywords.get("causal", True) and case.k_cache.element_size() == 2:
            chunk = part(case, 7, 8)
            chunk.q, chunk.seq_lens, chunk.cu_seqlens_q = chunk.q[:777], chunk.seq_lens - 1223, chunk.cu_seqlens_q.clamp(max=777)
            assert torch.equal(attend(chunk)[0], out[-2000:-1223])
    finally:
        prefill_sm90.enable(True)


def test_b066_no_compilation_after_warm_up():
    """Other lengths, other numbers of sequences within the same power of two, other tables: no kernel is compiled again."""
    import triton.knobs

    def step(lens: list[int], query_lens: list[int], bucket: int) -> None:
        case = make_case(lens, query_lens, poison=False, max_pages=64, **SHAPE)
        attend(Case(*case.tensors, {**case.keywords, "max_query_len": bucket}))

    for bucket, query in ((1, 1), (8, 5), (1000, 20)):
        step([100] * 9, [query] * 9, bucket)
    compiled: list[str] = []
    before, triton.knobs.runtime.jit_post_compile_hook = (
        triton.knobs.runtime.jit_post_compile_hook,
        lambda **k: compiled.append(str(k["repr"])),
    )
    try:
        for bucket, query in ((1, 1), (8, 3), (1000, 64)):
            for count in (9, 12, 16):
                step([1 + 60 * i for i in range(1, count + 1)], [min(query, 1 + 60)] * count, bucket)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled


@pytest.mark.parametrize("query_len", [1, 40])
def test_b098_cache_beyond_2_to_31_elements(query_len):
    check_far_pages(query_len)


def test_one_captured_cascade_serves_every_prefix():
    """Captured for a prefix of 32768 keys while there is none: 64 rows, some of them padding, then any prefix."""
    case = make_case([32768, *[300] * 62], [0, *[1] * 62], extra_rows=2, **SHAPE)
    q, k_cache, v_cache, table, lens, starts = case.tensors
    shared_len, own, own_lens, own_starts = lens[:1].clone(), table[1:, :19].contiguous(), lens[1:].clone(), starts[1:].clone()
    longest = shared_len.clone()
    shared_len.zero_()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return tkernels.cascade_attention(
            q, k_cache, v_cache, table[0], shared_len, own, own_lens, own_starts, scale=128**-0.5, max_query_len=1, return_lse=True
        )

    graph, (out, lse) = captured(call)
    for shared in (0, 1, 100, 128, 129, 2047, 2048, 8192, 32767, 32768, 40000):
        shared_len.fill_(shared)
        own_lens.copy_(torch.randint(0, 301, (62,)))
        out.fill_(float("nan"))
        graph.replay()
        eager, eager_lse = call()
        assert torch.equal(out, eager) and torch.equal(lse, eager_lse), f"prefix {shared}"
        both = torch.minimum(shared_len, longest)
        slots = torch.arange(16, device="cuda", dtype=torch.int32)
        keys = [(row[:, None] * 16 + slots).flatten() for row in (table[0], *own)]
        whole = torch.stack([torch.cat((keys[0][: int(both)], row)) for row in keys[1:]])
        caches = [cache.flatten(0, 1)[:, None] for cache in (k_cache, v_cache)]
        # on the GPU: 64 times 32768 keys in fp64 would take the CPU a minute
        want, want_lse = paged_attention_ref(
            q.float(), *caches, whole, torch.where(own_lens > 0, own_lens + both, 0), own_starts, scale=128**-0.5
        )
        assert torch.isfinite(out).all() and (out.float() - want).norm() <= 6e-3 * want.norm(), f"prefix {shared}"
        torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("heads", [(32, 8), (14, 2), (71, 1), (8, 8)], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32], ids=str)
def test_cascade_of_every_tile(heads, dim, dtype):
    """One token to a batch that sees the prefix as one sequence; soft-cap, sinks and scales with the fp8 cache."""
    keywords = {"softcap": 5.0, "sinks": torch.randn(heads[0], device="cuda"), "k_scale": 0.5} if dtype == torch.float8_e4m3fn else {}
    for query_lens in ([1], [1] * 7, [1, 5, 1] * 6, [1, 200, 1, 300]):
        own = [q + 7 for q in query_lens]
        shape = {**SHAPE, "heads": heads[0], "kv_heads": heads[1], "dim": dim, "dtype": dtype}
        case = make_case([1024 + n for n in own], query_lens, poison=False, **shape, **keywords)
        case.block_table[:, :64] = case.block_table[0, :64].clone()
        q, k_cache, v_cache, table, lens, starts = case.tensors
        shared_len = torch.full((1,), 1024, dtype=torch.int32, device="cuda")
        out, lse = tkernels.cascade_attention(
            q, k_cache, v_cache, table[0, :64], shared_len, table[:, 64:], lens - 1024, starts, return_lse=True, **case.keywords
        )
        check(case, out, lse)
