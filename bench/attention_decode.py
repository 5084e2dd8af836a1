"""Decode over a paged cache against torch SDPA on contiguous KV, in one run, inside CUDA graphs.

    python -m bench.attention_decode [--cases rows,mixed,…] [--sweep] [--out FILE]

Each case is checked against the oracle first; a wrong one is not timed. --sweep: every tile choice of _SWEEP besides the shipped one.
``length`` and ``batch`` look for cliffs (attention_sweep.py). The results file is written after each case.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention_common import READ_BANDWIDTH, Batch, capture, interleaved, lay_out_by_head, make_batch, relative_error
from bench.attention_sweep import TITLE, by_batch, by_length
from bench.harness import write_results
from bench.plan_sizes import read_trace
from tkernels import _dependent
from tkernels._target import target_of
from tkernels.attention import decode_one_sm90, decode_sm90
from tkernels.attention._inputs import check_inputs
from tkernels.attention._tiles import DecodeTiles, PrefillTiles, decode_tiles, prefill_tiles
from tkernels.attention.cascade import cascade_attention
from tkernels.attention.decode import QUERY_LEN, decode
from tkernels.attention.merge import merge
from tkernels.attention.paged import launch
from tkernels.attention.prefix import prefix, splits_of
from tkernels.attention.ref import paged_attention_ref

_CASES = ("rows", "mixed", "fp8", "window", "features", "queries", "cascade", "length", "batch")  # the first six by default
ROWS = [(1, 1024), (1, 8192), (1, 131072), (8, 4096), (16, 1024), (32, 4096), (64, 2048), (128, 1024), (128, 8192), (256, 2048)]
CASCADES = [(64, 8192, 128), (8, 8192, 128), (256, 2048, 128)]  # sequences, shared keys, own keys
_SWEEP = {
    f"w{warps}p{programs}s{stages}": DecodeTiles(
        block_n=64, programs_per_sm=programs, num_warps=warps, num_stages=stages, maxnreg=registers
    )
    for warps, programs, stages, registers in (
        (4, 4, 2, 128),
        (4, 3, 3, 168),
        (4, 2, 3, None),
        (4, 2, 4, None),
        (8, 2, 3, 128),
        (8, 2, 4, 128),
    )
}

_PREFIX_SWEEP = {
    f"{m}x{n}w{warps}s{stages}r{registers}": PrefillTiles(
        block_m=m, block_n=n, num_warps=warps, num_stages=stages, maxnreg=registers
    )
    for m, n, warps, stages, registers in (
        (128, 32, 8, 4, 128), (128, 64, 8, 2, 128), (128, 64, 8, 2, None), (128, 64, 8, 3, None), (128, 128, 8, 2, None),
        (64, 32, 4, 3, 160), (64, 64, 4, 2, 168), (64, 64, 4, 3, 240),
    )
}  # fmt: skip


def ours(batch: Batch, tiles: DecodeTiles | None = None, **keywords: Any) -> Any:
    """call(i) -> out: the launches of paged_attention for a decode bucket, without the op around them; of decode.py, with ``tiles``."""
    longest = int((batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1]).max())
    out = torch.full_like(batch.q, float("nan"))
    window, softcap, sinks = keywords.get("window", 0), keywords.get("softcap", 0.0), keywords.get("sinks")
    scales = (keywords.get("k_scale"), keywords.get("v_scale"))

    def call(i: int) -> torch.Tensor:
        inputs = check_inputs(*batch.arguments(i), batch.q.shape[-1] ** -0.5, True, window, softcap, sinks, *scales, 1.0)
        if tiles is None:
            launch(inputs, out, None, longest)
        else:
            decode(inputs, out, None, 1 if longest == 1 else QUERY_LEN, tiles)
        return out

    return call


def twin(batch: Batch, **keywords: Any) -> Any:
    """``ours`` by the plain Triton kernel."""
    q, k_cache = batch.q, batch.k_cache
    queries = 1 if len(q) == len(batch.seq_lens) else QUERY_LEN
    rows = queries * q.shape[1] // k_cache.shape[2]
    return ours(batch, decode_tiles(target_of(q.device).arch, q.shape[2], k_cache.element_size(), rows, len(batch.seq_lens)), **keywords)


def taken(batch: Batch, query: int) -> bool:
    """Whether a Gluon kernel computes sequences of ``query`` tokens."""
    inputs = check_inputs(*batch.arguments(0), 1.0, True, 0, 0.0, None, None, None, 1.0)
    arch = target_of(batch.q.device).arch
    if query <= decode_one_sm90.most_queries(inputs):
        return decode_one_sm90.refusal(inputs, arch) is None
    return decode_sm90.refusal(inputs, arch) is None


def dependent(call: Any, number: int) -> torch.cuda.CUDAGraph:
    """A graph of dependent launches: each begins while the one before ends."""
    _dependent.enable(True)
    try:
        return capture(call, number)
    finally:
        _dependent.enable(False)


def sdpa(batch_size: int, length: int, copies: int) -> dict[str, Any]:
    """SDPA on contiguous KV: cuDNN's and flash's kernel, and flash's with the heads of a group as query rows (no mask is needed)."""
    q = torch.randn((batch_size, 32, 1, 128), device="cuda", dtype=torch.bfloat16)
    keys, values = (torch.empty((copies, batch_size, 8, length, 128), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for t in (keys, values):
        for part in t:
            part.normal_()

    def spelled(backend: SDPBackend, rows: tuple[int, ...], grouped: bool) -> Any:
        def call(i: int) -> torch.Tensor:
            with sdpa_kernel([backend]):
                return torch.nn.functional.scaled_dot_product_attention(
                    q.view(rows), keys[i % copies], values[i % copies], enable_gqa=grouped
                )

        return call

    grouped, packed = (batch_size, 32, 1, 128), (batch_size, 8, 4, 128)
    return {
        "sdpa cudnn": spelled(SDPBackend.CUDNN_ATTENTION, grouped, True),
        "sdpa cudnn packed": spelled(SDPBackend.CUDNN_ATTENTION, packed, False),
        "sdpa flash": spelled(SDPBackend.FLASH_ATTENTION, grouped, True),
        "sdpa flash packed": spelled(SDPBackend.FLASH_ATTENTION, packed, False),
    }


def check(batch: Batch, call: Any, **keywords: Any) -> float:
    keywords = {**keywords, "window": keywords.get("window") or None}
    q, k, v, *index = batch.arguments(0)
    expected, _ = paged_attention_ref(q.float(), k, v, *index, scale=q.shape[-1] ** -0.5, **keywords)
    out = call(0)
    error = relative_error(out, expected)
    worst = float((out.float() - expected).abs().max() / expected.abs().max())
    assert error < 6e-3 and worst < 3e-2, f"wrong: relative error {error:.2e}, worst element {worst:.2e}"
    return error


def run_case(name: str, lens: list[int], query: int = 1, peer: tuple[int, int] | None = None, sweep: dict[str, Any] | None = None,
             cache_dtype: torch.dtype = torch.bfloat16, **keywords: Any) -> dict[str, Any]:  # fmt: skip
    batch = make_batch(lens, [query] * len(lens), cache_dtype=cache_dtype)
    calls = {"ours": ours(batch, **keywords)}
    if taken(batch, query):
        calls["plain Triton"] = twin(batch, **keywords)
    for label, choice in (sweep or {}).items():
        calls[label] = ours(batch, choice, **keywords)
    errors = {label: check(batch, call, **keywords) for label, call in calls.items()}
    if peer:
        calls |= sdpa(*peer, len(batch.tables))
    number = 10 if batch.kv_bytes > 64 << 20 else 20
    graphs = {label: capture(call, number) for label, call in calls.items()}
    graphs["ours, dependent"] = dependent(calls["ours"], number)
    times = interleaved(graphs, number)
    floor = batch.kv_bytes / READ_BANDWIDTH * 1e6
    result = {"case": name, "us": times, "error": errors, "floor_us": floor, "kv_bytes": batch.kv_bytes}
    ratio = f"{times['ours'] / min(us for label, us in times.items() if label.startswith('sdpa')):5.2f}" if peer else "    -"
    print(f"{name:>18} ours {times['ours']:8.1f}  floor {floor:7.1f} x{times['ours'] / floor:5.2f}  sdpa x{ratio}  "
          + "  ".join(f"{k} {v:.1f}" for k, v in times.items() if k != "ours"), flush=True)  # fmt: skip
    return result


def prefix_and_merge(
    label: str, tiles: PrefillTiles, batch: Batch, tables: list[torch.Tensor], length: torch.Tensor
) -> dict[str, Callable[[int], Any]]:
    """The split prefix and the merge of its states with one more of each query, in launches of their own."""
    inputs = check_inputs(*batch.arguments(0), batch.q.shape[-1] ** -0.5, True, 0, 0.0, None, None, None, 1.0)
    capacity = tables[0].numel() * inputs.page_size
    splits = splits_of(tiles, target_of(batch.q.device).num_sms, len(batch.q), inputs.heads, inputs.kv_heads, capacity)
    if not splits:
        return {}
    parts = torch.zeros((splits, *batch.q.shape), device="cuda")
    lses = torch.zeros(parts.shape[:3], device="cuda")

    def split(i: int) -> Any:
        prefix(inputs, tiles, tables[i % len(tables)], length, capacity, parts, lses)

    everyone = torch.tensor([0, len(batch.q)], dtype=torch.int32, device="cuda")
    expected, _ = paged_attention_ref(
        batch.q.float(), batch.k_cache, batch.v_cache, tables[0][None], length, everyone, scale=inputs.scale, causal=False
    )
    split(0)
    error = relative_error(merge(batch.q, torch.full_like(lses[0], float("-inf")), parts, lses)[0], expected)
    assert error < 6e-3, f"{label}: relative error {error:.2e}"
    return {f"{label} prefix": split, f"{label} merge of {splits}": lambda i: merge(batch.q, lses[0], parts, lses, a_decides=True)}


def run_cascade(seqs: int, shared: int, own: int, sweep: dict[str, PrefillTiles]) -> dict[str, Any]:
    """One step of sequences whose first ``shared`` keys are the same pages: with cascade, without, and the keys after them alone.

    sweep: tiles of the split prefix, which is timed alone, and so is the merge of as many states.
    """
    batch = make_batch([shared] + [own] * seqs, [0] + [1] * seqs)
    page_size = batch.k_cache.shape[1]
    prefixes = [table[0, : shared // page_size] for table in batch.tables]
    tails = [table[1:, : -(-own // page_size)].contiguous() for table in batch.tables]
    whole = [torch.cat((prefix.expand(seqs, -1), tail), 1) for prefix, tail in zip(prefixes, tails, strict=True)]
    shared_len, own_lens = batch.seq_lens[:1], batch.seq_lens[1:].clone()
    starts, scale = batch.cu_seqlens_q[1:].clone(), batch.q.shape[-1] ** -0.5
    without = replace(batch, tables=whole, seq_lens=own_lens + shared_len, cu_seqlens_q=starts)
    alone = replace(batch, tables=tails, seq_lens=own_lens, cu_seqlens_q=starts)

    def cascade(i: int) -> Any:
        prefix, tail = prefixes[i % len(tails)], tails[i % len(tails)]
        return cascade_attention(
            batch.q, batch.k_cache, batch.v_cache, prefix, shared_len, tail, own_lens, starts, scale=scale, max_query_len=1
        )

    calls = {"ours": cascade, "without cascade": ours(without), "own part": ours(alone)}
    errors = {label: check(alone if label == "own part" else without, call) for label, call in calls.items()}
    for label, tiles in sweep.items():
        calls |= prefix_and_merge(label, tiles, without, prefixes, shared_len)
    times = interleaved({label: capture(call, 10) for label, call in calls.items()}, 10)
    name = f"cascade {seqs} x ({shared} + {own})"
    print(f"{name:>18} ours {times['ours']:8.1f}  floor {batch.kv_bytes / READ_BANDWIDTH * 1e6:7.1f}  "
          f"{times['without cascade'] / times['ours']:.2f} times faster than without: {times['without cascade']:.1f}  "
          f"own part {times['own part']:.1f}  " + "  ".join(f"{k} {v:.1f}" for k, v in list(times.items())[3:]), flush=True)  # fmt: skip
    return {
        "case": name, "us": times, "error": errors, "floor_us": batch.kv_bytes / READ_BANDWIDTH * 1e6, "kv_bytes": batch.kv_bytes
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(_CASES[:6]))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--by-head", action="store_true", help="keys of a page head by head, not token by token")
    parser.add_argument("--out", default="", help="results file")
    options = parser.parse_args()
    lay_out_by_head(options.by_head)
    sweep = _SWEEP if options.sweep else {}
    cases = options.cases.split(",")
    if unknown := sorted(set(cases) - set(_CASES)):
        parser.error(f"--cases: expected some of {','.join(_CASES)}, got {','.join(unknown)}")
    results: list[dict[str, Any]] = []
    cliffs: list[dict[str, Any]] = []
    curves: dict[str, dict[int, float]] = {}

    def note(result: dict[str, Any] | None = None) -> None:
        if result is not None:
            results.append(result)
        if options.out:
            rows = {"": results, TITLE: cliffs} if cliffs else results
            write_results(options.out, "python -m bench.attention_decode", rows, **({"curves_us": curves} if curves else {}))

    random.seed(0)
    torch.manual_seed(0)
    if "rows" in cases:
        for b, n in ROWS:
            note(run_case(f"{b} x {n}", [n] * b, peer=(b, n), sweep=sweep))
    if "mixed" in cases:
        lens = [int(math.exp(random.uniform(math.log(64), math.log(16384)))) for _ in range(64)]
        note(run_case("64 log-uniform", lens, sweep=sweep))
        lens = [request.prompt + random.randint(1, request.generated) for request in random.sample(read_trace(), 64)]
        note(run_case("64 of the trace", lens, sweep=sweep))
    if "fp8" in cases:
        for b, n in ((b, n) for b, n in ROWS if b * n >= 1 << 17):  # 500 MB of bf16 and more
            note(run_case(f"fp8 {b} x {n}", [n] * b, cache_dtype=torch.float8_e4m3fn, sweep=sweep))
    if "window" in cases:
        for b in (1, 16):
            note(run_case(f"window {b} x 131072", [131072] * b, window=1024))
            note(run_case(f"no window {b} x 1024", [1024] * b))
    if "features" in cases:
        sinks = torch.randn(32, device="cuda")
        for label, keywords in (("plain", {}), ("softcap", {"softcap": 30.0}), ("sinks", {"sinks": sinks})):
            note(run_case(f"{label} 32 x 4096", [4096] * 32, **keywords))
    if "queries" in cases:
        for query in (1, 2, 4, 8):
            for b, n in ((1, 8192), (1, 9000), (32, 4096)):
                note(run_case(f"q{query} {b} x {n}", [n] * b, query=query))
    if "cascade" in cases:
        for seqs, shared, own in CASCADES:
            tiles = {"shipped": prefill_tiles(target_of(torch.device("cuda")).arch, 128, 2), **_PREFIX_SWEEP} if sweep else {}
            note(run_cascade(seqs, shared, own, tiles))
    if {"length", "batch"} & set(cases):
        cache = make_batch([8192] * 256, [1] * 256, rotate=0)  # 8.6 GB, which 16 x 131072 take too
        sweeps = [(f"length, {b} x n", by_length, (b,)) for b in (1, 16)] if "length" in cases else []
        sweeps += [("batch, b x 8192", by_batch, (8192, range(1, 257)))] if "batch" in cases else []
        for name, measured, arguments in sweeps:
            curves[name], rows = measured(cache, *arguments)
            cliffs += rows
            note()


if __name__ == "__main__":
    main()
