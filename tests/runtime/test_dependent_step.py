"""Programmatic dependent launch over whole decode steps: the bits are those without it, replay after replay, whatever runs between."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tkernels
from runtime.model import allocate_cache, random_model
from tkernels import _dependent
from tkernels._linear_kernels import Tile

pytestmark = pytest.mark.gpu

PAGE, CONTEXT, STEPS, REPLAYS = 16, 200, 4, 300
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    _dependent.enable(False)


def _tile(target: Any, dtype: Any, variant: str, rows: int, n: int, k: int) -> Tile | None:
    """Every kernel takes part, also where no table has these shapes: splits with their counters, a norm as a launch of its own."""
    if rows <= 4:
        return Tile("vector", 4, 128, 1, 4, 1)
    if variant in ("plain", "rope"):
        return Tile("matrix", 16, 64, 1, 4, 3, splits=2)
    return Tile("matrix", 16, 64, 1, 4, 3) if "gated" in variant else None


def _inputs(batch: int, device: torch.device) -> dict[str, Any]:
    pages = -(-CONTEXT // PAGE)
    table = torch.randperm(batch * pages).int().view(batch, pages) + 1
    lens = torch.randint(20, CONTEXT, (batch,))
    last = lens - 1
    tensors = {
        "input_ids": torch.randint(0, 1000, (batch,)),
        "positions": last,
        "slot_mapping": table[torch.arange(batch), last // PAGE].long() * PAGE + last % PAGE,
        "block_table": table,
        "seq_lens": lens.int(),
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32),
        "logits_rows": torch.arange(batch),
    }
    return {**{name: x.to(device) for name, x in tensors.items()}, "max_query_len": 1}


@pytest.mark.parametrize("batch", [1, 3, 16])
@torch.inference_mode()
def test_replays_give_the_bits_of_ordinary_launches(batch: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tkernels.linear"], "choose", _tile)  # the attribute of that name is the function
    model = random_model(SHAPE, seed=0, dtype=torch.bfloat16, device=device)
    caches = allocate_cache(model.spec, batch * -(-CONTEXT // PAGE) + 1, PAGE, torch.bfloat16, device)
    for pair in caches:
        for cache in pair:
            cache.normal_()
    model.bind_cache(caches)
    inputs = _inputs(batch, device)
    greedy = (torch.zeros(batch, device=device), torch.zeros(batch, dtype=torch.int32, device=device), torch.ones(batch, device=device))
    draws = torch.zeros(batch, dtype=torch.int64, device=device)

    def steps() -> list[torch.Tensor]:
        """Several steps in one graph, so that memory that one frees is written by the next."""
        ids, all_logits = inputs["input_ids"], []
        for _ in range(STEPS):
            logits = model(**{**inputs, "input_ids": ids})
            ids = tkernels.sample(logits, *greedy, draws, draws)
            all_logits.append(logits)
        return all_logits

    graphs, outs = {}, {}
    for on in (False, True):
        _dependent.enable(on)
        steps()
        torch.cuda.synchronize()
        graphs[on] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[on]):
            outs[on] = steps()

    big, weight = torch.randn(512, 256, device=device).bfloat16(), torch.ones(256, device=device).bfloat16()
    side = torch.cuda.Stream()
    for i in range(REPLAYS):
        inputs["input_ids"].random_(0, 1000)
        graphs[False].replay()
        want = [x.clone() for x in outs[False]]
        if i % 3 == 0:  # torch's kernels and ours, before it and beside it, of several lengths
            torch.randn(1 << (10 + i % 12), device=device).sort()
            tkernels.add_rms_norm(big, big, weight)
        if i % 3 == 1:
            with torch.cuda.stream(side):
                torch.mm(big, big.t())
                tkernels.silu_and_mul(big)
        for x in outs[True]:
            x.fill_(float("nan"))
        for _ in range(1 + i % 3):
            graphs[True].replay()
        for step, (x, y) in enumerate(zip(want, outs[True], strict=True)):
            assert torch.equal(x, y), f"replay {i}, step {step}"
    torch.cuda.synchronize()
