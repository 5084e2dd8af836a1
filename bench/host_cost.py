"""Host time of an op call: made anew, through checks and Triton's launcher, against one that repeats the launches of an earlier call.

    python -m bench.host_cost --out bench/results/host_cost_h200.json

The ops of a decode step of a Llama-1B-shaped stack at each batch size, called through torch's dispatcher. Both ways give the same bits,
which is checked first. Calls are issued in short bursts from an idle device, so that a full queue holds nothing up; the least of the
bursts counts. torch's own rms_norm and mm stand beside them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.harness import write_results
from tkernels import _repeats

HIDDEN, HEADS, KV_HEADS, DIM, FEED, CONTEXT, PAGE = 2048, 32, 8, 64, 8192, 1024, 16
OPS = torch.ops.tkernels


def calls(batch: int, device: str) -> dict[str, Callable[[], Any]]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(torch.bfloat16) * 0.05

    x, residual, norm = draw(batch, HIDDEN), draw(batch, HIDDEN), draw(HIDDEN)
    qkv, o, gate_up, down = draw((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), draw(HIDDEN, HIDDEN), draw(2 * FEED, HIDDEN), draw(HIDDEN, FEED)
    wide, fed = draw(batch, 2 * FEED), draw(batch, FEED)
    q, k, v = draw(batch, HEADS, DIM), draw(batch, KV_HEADS, DIM), draw(batch, KV_HEADS, DIM)
    pages = CONTEXT // PAGE
    k_cache, v_cache = draw(batch * pages, PAGE, KV_HEADS, DIM), draw(batch * pages, PAGE, KV_HEADS, DIM)
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    lens = torch.full((batch,), CONTEXT, dtype=torch.int32, device=device)
    cu = torch.arange(batch + 1, dtype=torch.int32, device=device)
    positions = torch.full((batch,), CONTEXT - 1, device=device)
    slots = (torch.arange(batch, device=device) + 1) * CONTEXT - 1
    cos_sin, logits = torch.randn(CONTEXT, DIM, device=device), draw(batch, 32000)
    zeros, ones = torch.zeros(batch, device=device), torch.ones(batch, device=device)
    top_k, seeds, steps = zeros.int(), zeros.long(), zeros.long()

    def attention() -> torch.Tensor:
        out = torch.empty_like(q)
        OPS.paged_attention_out(
            q, k_cache, v_cache, table, lens, cu, DIM**-0.5, 1, True, 0, 0.0, None, None, None, 1.0, out, None
        )  # fmt: skip
        return out

    return {
        "rms_norm": lambda: OPS.rms_norm(x, norm, 1e-5),
        "add_rms_norm": lambda: OPS.add_rms_norm(x, residual, norm, 1e-5),
        "linear qkv, norm": lambda: OPS.linear(x, qkv, None, norm, None, False, 1e-5),
        "linear qkv, norm, rope_and_cache": lambda: OPS.linear_rope_and_cache(
            x, qkv, None, norm, positions, cos_sin, k_cache, v_cache, slots, eps=1e-5
        ),
        "rope_and_cache": lambda: OPS.rope_and_cache(q, k, v, positions, cos_sin, k_cache, v_cache, slots),
        "paged_attention_out": attention,
        "linear o, residual": lambda: OPS.linear(x, o, None, None, residual),
        "linear gate_up, norm, gated": lambda: OPS.linear(x, gate_up, None, norm, None, True, 1e-5),
        "linear down, residual": lambda: OPS.linear(fed, down, None, None, residual),
        "silu_and_mul": lambda: OPS.silu_and_mul(wide),
        "sample": lambda: OPS.sample(logits, zeros, top_k, ones, seeds, steps),
        "torch rms_norm": lambda: torch.nn.functional.rms_norm(x, (HIDDEN,), norm),
        "torch mm": lambda: torch.mm(x, o),
    }


def host_us(call: Callable[[], Any], synchronize: Callable[[], None], bursts: int) -> float:
    times = []
    for _ in range(bursts):
        synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - start) / 20)
    return min(times) * 1e6


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--bursts", type=int, default=20)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    rows = []
    for batch in options.batches:
        for name, call in calls(batch, device).items():
            us, results = {}, {}
            for way, enabled in (("anew", False), ("repeated", _repeats.ENABLED)):
                before, _repeats.ENABLED = _repeats.ENABLED, enabled
                for _ in range(3):
                    result = call()
                results[way] = [x.clone() for x in (result if isinstance(result, tuple) else (result,))]
                us[way] = host_us(call, synchronize, options.bursts)
                _repeats.ENABLED = before
            if not all(torch.equal(a, b) for a, b in zip(results["anew"], results["repeated"], strict=True)):
                raise SystemExit(f"{name} at {batch}: a repeated call gave other bits: not timing a wrong answer")
            rows.append({"batch": batch, "name": name, **us})
            print(f"batch {batch:4} {name:30} {us['anew']:8.1f} us {us['repeated']:8.1f} us", flush=True)
        if options.out:
            write_results(options.out, "python -m bench.host_cost", rows, shape="Llama-1B")


if __name__ == "__main__":
    main()
