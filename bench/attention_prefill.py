"""Causal prefill over a paged cache against cuDNN SDPA on contiguous tensors and compiled FlexAttention, in one run.

    python bench/attention_prefill.py [--cases rows,chunked,mixed] [--sweep] [--no-peers]

Each case is checked against the oracle first; a wrong one is not timed. FLOPs: 4 · dim · heads · (query, key) pairs that are seen.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention_common import Batch, capture, interleaved, make_batch, relative_error, save
from tkernels.attention._inputs import check_inputs
from tkernels.attention._tiles import PrefillTiles
from tkernels.attention.decode import QUERY_LEN, decode
from tkernels.attention.prefill import prefill
from tkernels.attention.ref import paged_attention_ref

ROWS = [(8, 1024), (4, 4096), (2, 8192), (1, 16384)]
CHUNKS = [(2048, 16384), (512, 8192), (2048, 131072)]  # query tokens, keys
_SWEEP = {
    f"{m}x{n}w8s{stages}": PrefillTiles(block_m=m, block_n=n, num_warps=8, num_stages=stages, maxnreg=registers)
    for m, n, stages, registers in ((128, 64, 3, None), (128, 32, 2, 128), (128, 32, 3, 128), (128, 32, 4, 128), (128, 128, 2, None))
}


def ours(batch: Batch, tiles: PrefillTiles | None = None, with_decode: bool = False, **keywords: Any) -> Any:
    out = torch.full_like(batch.q, float("nan"))

    def call(i: int) -> torch.Tensor:
        inputs = check_inputs(
            *batch.arguments(i), batch.q.shape[-1] ** -0.5, True, keywords.get("window", 0), keywords.get("softcap", 0.0), None,
            keywords.get("k_scale"), keywords.get("v_scale"), 1.0,
        )  # fmt: skip
        prefill(inputs, out, None, QUERY_LEN + 1, tiles)
        if with_decode:
            decode(inputs, out, None, QUERY_LEN)
        return out

    return call


def check(batch: Batch, call: Any, **keywords: Any) -> float:
    """Against the oracle in fp32, on the last queries of the first and the last sequence and on the first ones of the first."""
    out = call(0).clone()
    q, k, v, table, lens, starts = batch.arguments(0)
    keywords = {**keywords, "window": keywords.get("window") or None}
    worst = 0.0
    for s, tail in ((0, True), (0, False), (len(lens) - 1, True)):
        first, last, length = int(starts[s]), int(starts[s + 1]), int(lens[s])
        rows = min(last - first, 128)
        rows_at = slice(last - rows, last) if tail else slice(first, first + rows)
        keys = length if tail else length - (last - first) + rows
        part = torch.tensor([0, rows], dtype=torch.int32, device=q.device)
        expected, _ = paged_attention_ref(
            q[rows_at].float(), k, v, table[s : s + 1], lens.new_tensor([keys]), part, scale=q.shape[-1] ** -0.5, **keywords
        )
        worst = max(worst, relative_error(out[rows_at], expected))
    assert worst < 6e-3, f"wrong: relative error {worst:.2e}"
    return worst


def peers(batch: int, length: int) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = torch.randn((batch, 32, length, 128), device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn((batch, 8, length, 128), device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def cudnn(_: int) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return {"cudnn": cudnn, "flex": lambda _: compiled(q, k, v, block_mask=mask, enable_gqa=True)}


def run_case(name: str, lens: list[int], query_lens: list[int], others: dict[str, Any], sweep: dict[str, PrefillTiles],
             cache_dtype: torch.dtype = torch.bfloat16, page_size: int = 16, **keywords: Any) -> dict[str, Any]:  # fmt: skip
    batch = make_batch(lens, query_lens, cache_dtype=cache_dtype, page_size=page_size)
    calls = {"ours": ours(batch, **keywords)} | {label: ours(batch, tiles, **keywords) for label, tiles in sweep.items()}
    errors = {}
    for label, call in list(calls.items()):
        try:
            errors[label] = check(batch, call, **keywords)
        except Exception as error:
            if label == "ours":
                raise
            print(f"{name} {label}: {type(error).__name__} {str(error)[:120]}", flush=True)
            del calls[label]
    calls |= others
    pairs = sum(q * (n - q) + q * (q + 1) // 2 for q, n in zip(query_lens, lens, strict=True))
    graphs = {label: capture(call, 10) for label, call in calls.items()}
    times = interleaved(graphs, 10, rounds=5)
    rates = {label: 4 * 128 * 32 * pairs / us / 1e6 for label, us in times.items()}
    print(f"{name:>22} TFLOP/s " + "  ".join(f"{label} {rate:.0f}" for label, rate in rates.items()), flush=True)
    return {"case": name, "us": times, "tflops": rates, "error": errors}


def run_mixed() -> dict[str, Any]:
    """63 decode rows and one chunk of 449 tokens in one launch set, against the two apart."""
    both = make_batch([2048] * 64, [1] * 63 + [449])
    rows, chunk = make_batch([2048] * 63, [1] * 63), make_batch([2048], [449])
    out = torch.empty_like(rows.q)

    def decode_rows(i: int) -> None:
        decode(check_inputs(*rows.arguments(i), 128**-0.5, True, 0, 0.0, None, None, None, 1.0), out, None, 1)

    calls = {"together": ours(both, with_decode=True), "rows": decode_rows, "chunk": ours(chunk)}
    times = interleaved({label: capture(call, 10) for label, call in calls.items()}, 10)
    print(
        "mixed us",
        {label: round(us, 1) for label, us in times.items()},
        f"ratio {times['together'] / (times['rows'] + times['chunk']):.2f}",
    )
    return {"case": "mixed", "us": times}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="rows,chunked,mixed")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--name", default="attention_prefill")
    options = parser.parse_args()
    sweep = _SWEEP if options.sweep else {}
    torch.manual_seed(0)
    results = []
    if "rows" in options.cases:
        for b, n in ROWS:
            results.append(run_case(f"{b} x {n}", [n] * b, [n] * b, {} if options.no_peers else peers(b, n), sweep))
    if "chunked" in options.cases:
        for q, n in CHUNKS:
            results.append(run_case(f"{q} on {n}", [n], [q], {}, sweep))
    if "mixed" in options.cases:
        results.append(run_mixed())
    save(options.name, results)


if __name__ == "__main__":
    main()
