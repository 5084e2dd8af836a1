"""Causal prefill over a paged cache: the Gluon kernel and its plain-Triton twin against cuDNN SDPA on contiguous tensors and compiled
FlexAttention, in one run.

    python -m bench.attention_prefill [--cases rows,dims,mha,chunked,fp8,mixed] [--pages 16,64] [--sweep] [--only gluon cudnn] [--out FILE]

Each result is checked against the oracle first; a wrong one is not timed. The results file is written after each case.
FLOPs: 4 · dim · heads · (query, key) pairs that are seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention_common import Batch, capture, interleaved, lay_out_by_head, make_batch, relative_error
from bench.harness import write_results
from tkernels._target import target_of
from tkernels.attention._common import FP8
from tkernels.attention._inputs import Inputs, check_inputs
from tkernels.attention._tiles import PrefillTiles
from tkernels.attention.decode import QUERY_LEN
from tkernels.attention.paged import launch, launch_decode
from tkernels.attention.prefill import prefill
from tkernels.attention.prefill_sm90 import enable, prefill_sm90, refusal
from tkernels.attention.ref import output_dtype, paged_attention_ref

Call = Callable[[int], torch.Tensor]

ROWS = [(8, 1024), (4, 4096), (2, 8192), (1, 16384)]
CHUNKS = [(512, 8192), (2048, 8192), (512, 32768), (2048, 32768)]  # query tokens, cached prefix
FEW = [(8, 1024), (4, 4096), (1, 16384)]  # for other shapes
DIMS = [{"dim": 64}, {"dim": 256, "heads": 16, "kv_heads": 4}]
MHA = {"heads": 32, "kv_heads": 32}
CALLS = 10  # in a graph
LABELS = ["gluon", "twin", "cudnn", "flex"]
_SWEEP = {
    f"{m}x{n}w8s{stages}": PrefillTiles(block_m=m, block_n=n, num_warps=8, num_stages=stages, maxnreg=registers)
    for m, n, stages, registers in ((128, 64, 3, None), (128, 32, 2, 128), (128, 32, 3, 128), (128, 32, 4, 128), (128, 128, 2, None))
}


def checked(batch: Batch, i: int) -> Inputs:
    return check_inputs(*batch.arguments(i), batch.q.shape[-1] ** -0.5, True, 0, 0.0, None, None, None, 1.0)


def ours(batch: Batch, launch: Callable[..., Any], **keywords: Any) -> Call:
    out = torch.full_like(batch.q, float("nan"), dtype=output_dtype(batch.q.dtype))

    def call(i: int) -> torch.Tensor:
        launch(checked(batch, i), out, None, QUERY_LEN + 1, **keywords)
        return out

    return call


def launch_all(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None, max_query_len: int, *, gluon: bool) -> None:
    """Decode and prefill as the op launches them, prompts by the Gluon kernel or by its twin."""
    enable(gluon)
    try:
        launch(inputs, out, lse, max_query_len)
    finally:
        enable(True)


def launchers(batch: Batch, only: list[str]) -> dict[str, Callable[..., Any]]:
    """Our kernels that take this batch, of those asked for."""
    problem = refusal(checked(batch, 0), torch.empty_like(batch.q, dtype=output_dtype(batch.q.dtype)), target_of(batch.q.device).arch)
    if problem:
        print(f"not gluon: {problem}", flush=True)
    found = {"twin": prefill} if problem else {"gluon": prefill_sm90, "twin": prefill}
    return {label: launch for label, launch in found.items() if label in only}


def error_of(batch: Batch, call: Call) -> float:
    """Against the oracle in fp32, on the last queries of the first and the last sequence and on the first ones of the first."""
    out = call(0).clone()
    if out.dim() == 4:
        out = rearrange(out, "b h s d -> (b s) h d")
    q, k, v, table, lens, starts = batch.arguments(0)
    errors = []
    for s, tail in ((0, True), (0, False), (len(lens) - 1, True)):
        first, last, length = int(starts[s]), int(starts[s + 1]), int(lens[s])
        rows = min(last - first, 128)
        rows_at = slice(last - rows, last) if tail else slice(first, first + rows)
        keys = length if tail else length - (last - first) + rows
        part = torch.tensor([0, rows], dtype=torch.int32, device=q.device)
        expected, _ = paged_attention_ref(
            q[rows_at].float(), k, v, table[s : s + 1], lens.new_tensor([keys]), part, scale=q.shape[-1] ** -0.5
        )
        errors.append(relative_error(out[rows_at], expected))
    limit = 4e-2 if q.dtype == FP8 else 6e-3  # weights of three bits of mantissa
    assert all(error < limit for error in errors), f"wrong: relative errors {errors}"  # NaN is below no limit
    return max(errors)


def peers(batch: Batch, flex: bool) -> dict[str, Call]:
    """On the same values, contiguous: sequences of one length that are all queries."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    count, length = len(batch.seq_lens), int(batch.seq_lens[0])
    q = rearrange(batch.q, "(b s) h d -> b h s d", b=count).contiguous()
    table = batch.tables[0].long()
    k, v = (rearrange(cache[table], "b p s h d -> b h (p s) d")[:, :, :length].contiguous() for cache in (batch.k_cache, batch.v_cache))

    def cudnn(_: int) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    found: dict[str, Call] = {"cudnn": cudnn}
    if flex:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)
        found["flex"] = lambda _: compiled(q, k, v, block_mask=mask, enable_gqa=True)
    return found


def run_case(
    name: str, lens: list[int], query_lens: list[int], options: argparse.Namespace, *, against: str = "", page_size: int = 16, **shape: int
) -> dict[str, Any]:
    """against: "" no peers, "cudnn", or "flex" for both."""
    batch = make_batch(lens, query_lens, page_size=page_size, **shape)
    calls = {label: ours(batch, launch) for label, launch in launchers(batch, options.only).items()}
    if options.sweep:
        calls |= {label: ours(batch, prefill, tiles=tiles) for label, tiles in _SWEEP.items()}
    if against:
        found = peers(batch, against == "flex" and "flex" in options.only)
        calls |= {label: call for label, call in found.items() if label in options.only}
    errors, graphs = {}, {}
    for label, call in calls.items():
        try:
            errors[label] = error_of(batch, call)
            graphs[label] = capture(call, CALLS)
        except Exception as error:
            if label in ("gluon", "twin"):
                raise
            print(f"{name} {label}: {type(error).__name__} {str(error)[:120]}", flush=True)
    pairs = sum(q * (n - q) + q * (q + 1) // 2 for q, n in zip(query_lens, lens, strict=True))
    times = interleaved(graphs, CALLS, rounds=5)
    rates = {label: 4 * batch.q.shape[2] * batch.q.shape[1] * pairs / us / 1e6 for label, us in times.items()}
    print(
        f"{name:>24} page {page_size:<3} TFLOP/s " + "  ".join(f"{label} {rate:.0f}" for label, rate in rates.items())
        + "   error " + "  ".join(f"{label} {error:.2e}" for label, error in errors.items()), flush=True,
    )  # fmt: skip
    return {"case": name, "page_size": page_size, **shape, "us": times, "tflops": rates, "error": errors}


def run_fp8(name: str, lens: list[int], options: argparse.Namespace, page_size: int) -> dict[str, Any]:
    """Queries, keys and values of e4m3 beside bf16, and beside bf16 queries over an e4m3 cache."""
    batches = {
        "bf16": make_batch(lens, lens, page_size=page_size),
        "e4m3": make_batch(lens, lens, page_size=page_size, dtype=FP8),
        "e4m3 cache": make_batch(lens, lens, page_size=page_size, cache_dtype=FP8),
    }
    calls = {}
    for kind, batch in batches.items():
        found = launchers(batch, options.only)
        calls |= {f"{kind} {label}": (batch, ours(batch, launch)) for label, launch in found.items() if label == "gluon" or kind != "bf16"}
    errors = {label: error_of(batch, call) for label, (batch, call) in calls.items()}
    times = interleaved({label: capture(call, CALLS) for label, (_, call) in calls.items()}, CALLS, rounds=5)
    q = batches["bf16"].q
    rates = {label: 2 * q.shape[2] * q.shape[1] * sum(n * (n + 1) for n in lens) / us / 1e6 for label, us in times.items()}
    print(
        f"{name:>24} page {page_size:<3} TFLOP/s " + "  ".join(f"{label} {rate:.0f}" for label, rate in rates.items())
        + "   error " + "  ".join(f"{label} {error:.2e}" for label, error in errors.items()), flush=True,
    )  # fmt: skip
    return {"case": f"{name} e4m3", "page_size": page_size, "us": times, "tflops": rates, "error": errors}


def run_mixed(chunks: list[int], rows: int, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Decode rows and prefill chunks in one call, against the two apart."""
    both = make_batch([length] * (rows + len(chunks)), [1] * rows + chunks)
    alone, chunk = make_batch([length] * rows, [1] * rows), make_batch([length] * len(chunks), chunks)
    out = torch.empty_like(alone.q)

    def decode_rows(i: int) -> torch.Tensor:
        launch_decode(checked(alone, i), out, None, 1)
        return out

    calls: dict[str, Call] = {"rows": decode_rows}
    found = launchers(both, options.only)
    for label, launcher in found.items():
        calls[f"{label} together"] = ours(both, launch_all, gluon=label == "gluon")
        calls[f"{label} chunk"] = ours(chunk, launcher)
        error_of(both, calls[f"{label} together"])
    times = interleaved({label: capture(call, CALLS) for label, call in calls.items()}, CALLS)
    ratios = {label: times[f"{label} together"] / (times["rows"] + times[f"{label} chunk"]) for label in found}
    name = f"{rows} rows + {chunks}"
    print(
        f"{name:>24} us " + "  ".join(f"{label} {us:.1f}" for label, us in times.items())
        + "   together / apart " + "  ".join(f"{label} {ratio:.2f}" for label, ratio in ratios.items()), flush=True,
    )  # fmt: skip
    return {"case": f"mixed {name} at {length}", "us": times, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="rows,dims,mha,chunked,fp8,mixed")
    parser.add_argument("--pages", default="16,64")
    parser.add_argument("--sweep", action="store_true", help="tile sizes of the plain Triton kernel too")
    parser.add_argument("--only", nargs="+", choices=LABELS, default=LABELS, help="what to time; the default is all")
    parser.add_argument("--by-head", action="store_true", help="keys of a page head by head, not token by token")
    parser.add_argument("--out", default="", help="results file")
    options = parser.parse_args()
    lay_out_by_head(options.by_head)
    cases = options.cases.split(",")
    pages = [int(page) for page in options.pages.split(",")]
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []

    def add(result: dict[str, Any]) -> None:
        results.append(result)
        if options.out:
            write_results(options.out, "python -m bench.attention_prefill", results)

    if "rows" in cases:
        for page in pages:
            for b, n in ROWS:
                add(run_case(f"{b} x {n}", [n] * b, [n] * b, options, against="flex" if page == pages[0] else "cudnn", page_size=page))
    if "dims" in cases:
        for shape in DIMS:
            for b, n in FEW:
                add(run_case(f"{b} x {n} dim {shape['dim']}", [n] * b, [n] * b, options, against="cudnn", **shape))
    if "mha" in cases:
        for b, n in FEW:
            add(run_case(f"{b} x {n} MHA", [n] * b, [n] * b, options, against="cudnn", **MHA))
    if "chunked" in cases:
        for page in pages:
            for q, prefix in CHUNKS:
                add(run_case(f"{q} on {prefix}", [prefix + q], [q], options, page_size=page))
    if "fp8" in cases:
        for page in pages:
            for b, n in ROWS:
                add(run_fp8(f"{b} x {n}", [n] * b, options, page))
    if "mixed" in cases:
        add(run_mixed([449], 63, 2048, options))
        add(run_mixed([1000, 500, 300, 120], 128, 2048, options))


if __name__ == "__main__":
    main()
