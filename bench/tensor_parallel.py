"""A decode step of a Llama-8B-shaped model shared by the GPUs of a torchrun, in one CUDA graph: our collectives against NCCL's.

    torchrun --nproc-per-node 4 -m bench.tensor_parallel --out bench/results/tensor_parallel_4x_h200.json

The same module is captured three times: with our collectives; with NCCL (its all-reduce after a copy, and the residual add and norm
on their own); and with collectives that only copy, which gives the share of the step that communication takes. Random weights,
every sequence holds --context tokens. Ours and NCCL's logits are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

from bench.collectives import Timer
from bench.harness import write_results
from bench.shapes import LLAMA_8B
from runtime.config import RuntimeConfig
from runtime.model import allocate_cache, random_model
from runtime.parallel import join
from tkernels.collectives.group import find

PAGE_SIZE = 16


def step_arguments(batch: int, context: int) -> dict[str, Any]:
    """One new token for each of ``batch`` sequences that hold ``context`` tokens with it."""
    pages = -(-context // PAGE_SIZE)
    table = torch.arange(1, batch * pages + 1, device="cuda", dtype=torch.int32).view(batch, pages)
    last = context - 1
    return {
        "input_ids": torch.arange(batch, device="cuda"),
        "positions": torch.full((batch,), last, device="cuda"),
        "slot_mapping": table[:, last // PAGE_SIZE].long() * PAGE_SIZE + last % PAGE_SIZE,
        "block_table": table,
        "seq_lens": torch.full((batch,), context, dtype=torch.int32, device="cuda"),
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
        "logits_rows": torch.arange(batch, device="cuda"),
        "max_query_len": 1,
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    parallel = join(RuntimeConfig.load({"parallel": {"tensor": int(os.environ["WORLD_SIZE"])}}))
    assert parallel is not None
    group, timer, rows = find(parallel.group), Timer(repeats=15), []
    model = random_model(LLAMA_8B, 0, "bfloat16", f"cuda:{os.environ['LOCAL_RANK']}", parallel)
    model.bind_cache(allocate_cache(model.spec, max(options.batches) * -(-options.context // PAGE_SIZE) + 1, PAGE_SIZE, "auto", "cuda"))
    for batch in options.batches:
        arguments = step_arguments(batch, options.context)
        graphs: dict[str, Any] = {"ours": timer.graph([lambda a=arguments: model(**a)])}
        workspace, group.workspace = group.workspace, None
        graphs["NCCL"] = timer.graph([lambda a=arguments: model(**a)])
        group.workspace, world, group.world = workspace, group.world, 1
        graphs["copies only"] = timer.graph([lambda a=arguments: model(**a)])
        group.world = world
        for name in ("ours", "NCCL"):
            graphs[name][0].replay()
        torch.cuda.synchronize()
        ours, theirs = graphs["ours"][2][0].float(), graphs["NCCL"][2][0].float()
        error = float((ours - theirs).norm() / theirs.norm())
        if not error < 3e-2:
            raise SystemExit(f"the logits of ours and of NCCL differ by {error}: not timing a wrong answer")
        times = timer.medians(graphs)
        share = 1 - times["copies only"] / times["ours"]
        rows.append({"batch": batch, "context": options.context, **times, "share in collectives": share, "logit_error": error})
        if parallel.rank == 0:
            print(rows[-1], flush=True)
    if options.out and parallel.rank == 0:
        write_results(options.out, "torchrun -m bench.tensor_parallel", rows, shape="Llama-8B", world=parallel.world)
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # graphs hold calls of the process group, whose destruction would wait for them


if __name__ == "__main__":
    main()
