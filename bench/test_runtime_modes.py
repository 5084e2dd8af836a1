"""A decode step of a Llama-1B-shaped model in each mode of the runtime, at each batch size, against what torch offers.

Wall clock per step, steps issued back to back. "auto" is what the runtime picks from its own measurement; ``extra_info["pick"]`` says
what that was.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from bench.decode_step import check_logits, our_step, peer_runs
from bench.peers import EAGER, why_absent
from bench.shapes import LLAMA_1B, TINY
from bench.suite import DEVICE, DTYPE, ON_GPU, Problem, sizes
from runtime.graphed import graphed
from runtime.model import random_model
from runtime.runner import DYNAMIC, PAD
from tkernels._op import reference_ops

BATCHES = sizes([1, 4, 16, 64, 256], [2])
(CONTEXT,) = sizes([1024], [48])
MODES = ("eager", "piecewise", "full", "auto")
BACKENDS = sizes(["eager", "inductor"], ["eager"])
OURS = [f"tkernels {mode}, {backend} pieces" for backend in BACKENDS for mode in MODES]
THEIRS = {"Inductor reduce-overhead": "reduce-overhead", "Inductor in one graph": "Inductor in one graph", EAGER: "torch eager"}


@functools.cache
def _models() -> tuple[Any, Any]:
    """The model and the same weights in fp32."""
    shape = LLAMA_1B if ON_GPU else TINY
    model = random_model(shape, seed=0, dtype=DTYPE, device=DEVICE)
    exact = random_model(shape, seed=0, dtype=torch.float32, device=DEVICE)
    exact.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    return model, exact


@pytest.fixture(autouse=True)
def _ops() -> Any:
    """Whole models on a CPU run the references."""
    with reference_ops():
        yield


@pytest.mark.parametrize("case", BATCHES, ids=lambda batch: f"batch {batch}")
@pytest.mark.parametrize("peer", [*OURS, *THEIRS])
def test_decode_step(measure: Any, case: int, peer: str) -> None:
    def build() -> Problem:
        torch.backends.cuda.matmul.allow_tf32 = False
        model, exact = _models()
        device = str(DEVICE)
        with torch.no_grad():
            errors = check_logits(model, exact, case, CONTEXT, device)
        calls: dict[str, Any] = {}
        picks: dict[str, str] = {}
        step, arguments = our_step(model, case, CONTEXT, device)
        for backend in BACKENDS:
            for mode in MODES:
                name = f"tkernels {mode}, {backend} pieces"
                config = {
                    "graph": {"mode": mode, "capture_sizes": [case], "max_tokens": case, "on_capture_error": "raise"},
                    "scheduler": {"max_num_seqs": case, "max_batch_tokens": max(case, 8)},
                    "compile": {"backend": backend},
                }
                with torch.no_grad():
                    graph = graphed(step, config, dynamic=DYNAMIC, pad=PAD, bounds={"seqs": case})
                    plan = graph.warmup(**arguments)
                picks[name] = next((row.pick for row in plan.rows if row.size == case), mode)
                calls[name] = lambda i, graph=graph: graph(**arguments)
        with torch.no_grad():
            expected = calls[OURS[0]](0).clone()
            wanted = {name: theirs for name, theirs in THEIRS.items() if why_absent(name) is None}
            runs = peer_runs(model, case, CONTEXT, device, list(wanted.values()))
            calls |= {name: (lambda i, run=runs[theirs]: run()) for name, theirs in wanted.items()}

        def check(name: str, tokens: torch.Tensor) -> float:
            """Our modes agree token for token; torch's module has a cache of its own, and its logits were compared above."""
            return float((tokens != expected).double().mean()) if name in OURS else 0.0

        spec = model.spec
        weights = sum(parameter.nbytes for parameter in model.parameters()) - (0 if spec.tied else model.embed_tokens.nbytes)
        kv = 2 * case * CONTEXT * spec.num_layers * spec.num_kv_heads * spec.head_dim * DTYPE.itemsize
        return Problem(
            peers=calls, check=check, tolerance=0.0, bytes=weights + kv, wall=True, repeats=9 if ON_GPU else 2,
            info={"logit_error": errors[0], "torch_logit_error": errors[1], "picks": picks, "context": CONTEXT},
        )  # fmt: skip

    measure(build)
