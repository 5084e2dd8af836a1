"""One decode step of a Llama stack in each mode, against what torch gives: eager, Inductor, reduce-overhead, one hand-made graph.

    python -m bench.decode_step --out bench/results/decode_step_h200.json

Random weights, every sequence holds --context tokens. Correctness before timing: eager, piecewise and full must agree bit for bit
at the same padded size, and our logits must be as near to the plain torch module's as bf16 allows. Times are wall clock per step
with steps issued back to back (what serving sees) and device time of a replay.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch

from bench.attention_common import READ_BANDWIDTH
from bench.harness import back_to_back_us, relative_error, write_results
from bench.plain_llama import PlainLlamaStep
from bench.shapes import BY_NAME, TINY
from runtime.graphed import graphed
from runtime.model import allocate_cache, random_model
from runtime.step_module import DYNAMIC, PAD, StepModule
from tkernels import _dependent

PAGE_SIZE = 16


def our_step(model: Any, batch: int, context: int, device: str) -> tuple[StepModule, dict[str, Any]]:
    """(the step, its arguments on the host: ``batch`` rows that hold ``context`` tokens, the new one included, on permuted pages)."""
    pages_each = -(-context // PAGE_SIZE)
    caches = allocate_cache(model.spec, batch * pages_each + 1, PAGE_SIZE, model.spec.dtype, device)
    for k_cache, v_cache in caches:
        k_cache.normal_()
        v_cache.normal_()
    model.bind_cache(caches)
    generator = torch.Generator().manual_seed(batch)
    table = torch.randperm(batch * pages_each, generator=generator).to(torch.int32).view(batch, pages_each) + 1
    last = context - 1
    arguments = {
        "input_ids": torch.randint(0, model.spec.vocab, (batch,), generator=generator),
        "token_source": torch.full((batch,), -1),
        "positions": torch.full((batch,), last),
        "slot_mapping": table[:, last // PAGE_SIZE].long() * PAGE_SIZE + last % PAGE_SIZE,
        "block_table": table,
        "seq_lens": torch.full((batch,), context, dtype=torch.int32),
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32),
        "logits_rows": torch.arange(batch),
        "temperature": torch.zeros(batch),
        "top_k": torch.zeros(batch, dtype=torch.int32),
        "top_p": torch.ones(batch),
        "seeds": torch.zeros(batch, dtype=torch.int64),
        "draws": torch.zeros(batch, dtype=torch.int64),
        "max_query_len": 1,
    }
    return StepModule(model, batch), arguments


def our_runs(
    model: Any, batch: int, context: int, device: str, backend: str, say: bool, dependent: bool = False
) -> dict[str, Callable[[], torch.Tensor]]:
    """dependent: captured with programmatic dependent launch."""
    before = _dependent.enabled()
    _dependent.enable(dependent)
    try:
        modes = ("piecewise", "full") if dependent else ("eager", "piecewise", "full")
        runs = _captured(model, batch, context, device, backend, say, modes)
    finally:
        _dependent.enable(before)
    return {f"{name}, dependent": run for name, run in runs.items()} if dependent else runs


def _captured(
    model: Any, batch: int, context: int, device: str, backend: str, say: bool, modes: tuple[str, ...]
) -> dict[str, Callable[[], torch.Tensor]]:
    runs = {}
    step, arguments = our_step(model, batch, context, device)
    for mode in modes:
        config = {
            "graph": {"mode": mode, "capture_sizes": [batch], "max_tokens": batch, "on_capture_error": "raise"},
            "scheduler": {"max_num_seqs": batch, "max_batch_tokens": max(batch, 8)},
            "compile": {"backend": backend},
        }
        graph = graphed(step, config, dynamic=DYNAMIC, pad=PAD, bounds={"seqs": batch})
        plan = graph.warmup(**arguments)
        if say:
            print(plan, flush=True)
        runs[f"ours {mode} ({backend})"] = lambda graph=graph: graph(**arguments)
    return runs


def peer_runs(model: Any, batch: int, context: int, device: str, which: list[str]) -> dict[str, Callable[[], torch.Tensor]]:
    ids = torch.randint(0, model.spec.vocab, (batch,), device=device)
    positions = torch.full((batch,), context - 1, device=device)
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    for name in which:
        plain = PlainLlamaStep(model, batch, context)
        if name == "torch eager":
            runs[name] = lambda plain=plain: plain(ids, positions)
            continue
        torch._dynamo.reset()
        compiled = torch.compile(plain, fullgraph=True, mode="reduce-overhead" if name == "reduce-overhead" else None)
        for _ in range(3):
            compiled(ids, positions)
        if name != "Inductor in one graph" or device == "cpu":
            runs[name] = lambda compiled=compiled: compiled(ids, positions)
            continue
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = compiled(ids, positions)
        # a graph does not keep alive what it reads: caches, ids and positions
        runs[name] = lambda graph=graph, out=out, read=(plain, compiled, ids, positions): (graph.replay(), out)[1]
    return runs


def floor_us(model: Any, batch: int, context: int) -> float:
    """What a step takes that does nothing but read the weights and the caches of its sequences, each once."""
    spec = model.spec
    weights = sum(p.nbytes for name, p in model.named_parameters() if name != "embed_tokens" or spec.tied)
    keys_and_values = 2 * batch * context * spec.num_layers * spec.num_kv_heads * spec.head_dim * model.embed_tokens.element_size()
    return (weights + keys_and_values) / READ_BANDWIDTH * 1e6


def check_modes(runs: dict[str, Callable[[], torch.Tensor]]) -> None:
    outs = {name: run().clone() for name, run in runs.items()}
    first = next(iter(outs))
    for name, out in outs.items():
        if not torch.equal(out, outs[first]):
            raise SystemExit(f"{name} and {first} differ: not timing a wrong answer")


def check_logits(model: Any, reference: Any, batch: int, context: int, device: str) -> tuple[float, float]:
    """Relative errors of our logits and of the plain module's, both against the plain module in fp32 on the same weights and cache."""
    _, arguments = our_step(model, batch, context, device)
    plain, exact = PlainLlamaStep(model, batch, context), PlainLlamaStep(reference, batch, context)
    for layer, block in enumerate(model.layers):
        for kind in ("k", "v"):
            pages = getattr(block.attention, f"{kind}_cache")[arguments["block_table"].long().to(device)]
            contiguous = pages.flatten(1, 2)[:, :context].transpose(1, 2)  # [batch, kv_heads, context, head_dim]
            for step in (plain, exact):
                getattr(step, f"{kind}_caches")[layer].copy_(contiguous)
    names = ("input_ids", "positions", "slot_mapping", "block_table", "seq_lens", "cu_seqlens_q", "logits_rows", "max_query_len")
    on_device = {name: arguments[name].to(device) if name != "max_query_len" else 1 for name in names}
    ours = model(**on_device)
    step_inputs = (on_device["input_ids"], on_device["positions"])
    expected = exact.logits(*step_inputs)
    errors = relative_error(ours, expected), relative_error(plain.logits(*step_inputs), expected)
    if not errors[0] <= 2 * errors[1] + 1e-5:
        raise SystemExit(f"relative error of our logits is {errors[0]}, of the plain module's {errors[1]}: not timing a wrong answer")
    return errors


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script without a GPU")
    parser.add_argument("--shape", choices=list(BY_NAME), default="llama-1b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor"])
    parser.add_argument("--peers", nargs="*", default=["torch eager", "reduce-overhead", "Inductor in one graph"])
    parser.add_argument("--pdl", choices=["off", "on", "both"], default="off", help="programmatic dependent launch between our kernels")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--verbose", action="store_true", help="print each plan")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name_of_shape = "tiny" if options.small else options.shape
    shape = TINY if options.small else BY_NAME[options.shape]
    model = random_model(shape, seed=0, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device)
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = random_model(shape, seed=0, dtype=torch.float32, device=device)
    reference.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    rows = []
    for batch in options.batches:
        errors = check_logits(model, reference, batch, options.context, device)
        peers = peer_runs(model, batch, options.context, device, options.peers)
        ours: dict[str, Callable[[], torch.Tensor]] = {}
        for backend in options.backends:
            runs: dict[str, Callable[[], torch.Tensor]] = {}
            for dependent in {"off": (False,), "on": (True,), "both": (False, True)}[options.pdl]:
                runs |= our_runs(model, batch, options.context, device, backend, options.verbose, dependent)
            check_modes(runs)
            ours |= runs
        floor = floor_us(model, batch, options.context)
        times: dict[str, list[float]] = {name: [] for name in (*ours, *peers)}
        for _ in range(options.repeats):  # interleaved: clocks drift for all alike
            for name, run in {**ours, **peers}.items():
                times[name].append(back_to_back_us(run, repeats=1))
        for name, samples in times.items():
            median = sorted(samples)[len(samples) // 2]
            row = {"batch": batch, "context": options.context, "name": name, "us": median, "floor_us": floor, "logit_errors": errors}
            rows.append(row)
            share = f", {median / floor:.2f} x what reading takes" if device == "cuda" else ""
            print(f"batch {batch:4} {name:32} {median:9.1f} us{share}", flush=True)
        if options.out:  # after each batch: a run that is cut short keeps what it has
            write_results(options.out, "python -m bench.decode_step", rows, shape=name_of_shape, page_size=PAGE_SIZE)
        del ours, peers
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
