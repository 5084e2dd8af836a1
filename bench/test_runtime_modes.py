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
from runtime.step_module import DYNAMIC, PAD
from tkernels._op import reference_ops

BATCHES = sizes([1, 8, 64, 256], [2])
(CONTEXT,) = sizes([1024], [48])
MODES = ("eager", "piecewise", "full", "auto")
PLANS = [*((mode, "eager") for mode in MODES), *sizes([("full", "inductor")], [])]
OURS = [f"tkernels {mode}, {backend} pieces" for mode, backend in PLANS]
# torch's best on this step; reduce-overhead, which is a little slower, is in bench/decode_step.py
THEIRS = {"Inductor in one graph": "Inductor in one graph", EAGER: "torch eager"}
COMPILED = sizes([1, 64], [])  # the batches that torch compiles for: 15 seconds each


@functools.cache
def _models() -> tuple[Any, Any]:
    """The model and the same weights in fp32."""
    shape = LLAMA_1B if ON_GPU else TINY
    model = random_model(shape, seed=0, dtype=DTYPE, device=DEVICE)
    exact = random_model(shape, seed=0, dtype=torch.float32, device=DEVICE)
    exact.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    return model, exact


def _logits(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """The model's own, for a step's arguments; the others belong to the sampler."""
    names = ("input_ids", "positions", "slot_mapping", "block_table", "seq_lens", "cu_seqlens_q", "logits_rows")
    inputs = {name: arguments[name].to(DEVICE) for name in names}
    return model(**inputs, max_query_len=arguments["max_query_len"]).float()


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
        for (mode, backend), name in zip(PLANS, OURS, strict=True):
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
            expected, logits = calls[OURS[0]](0).clone(), _logits(model, arguments)
            wanted = {name: theirs for name, theirs in THEIRS.items() if why_absent(name) is None and (name == EAGER or case in COMPILED)}
            runs = peer_runs(model, case, CONTEXT, device, list(wanted.values()))
            calls |= {name: (lambda i, run=runs[theirs]: run()) for name, theirs in wanted.items()}

        def check(name: str, tokens: torch.Tensor) -> float:
            """Our modes agree token for token; compiled pieces round otherwise, and may take a token that is as good within that.

            torch's module has a cache of its own, and its logits were compared above.
            """
            if name.endswith("inductor pieces"):
                lost = logits.amax(-1) - logits.gather(1, tokens.long()[:, None])[:, 0]
                return max(0.0, float((lost / logits.abs().amax(-1)).max()) - 2**-6)
            return float((tokens != expected).double().mean()) if name in OURS else 0.0

        spec = model.spec
        weights = sum(parameter.nbytes for parameter in model.parameters()) - (0 if spec.tied else model.embed_tokens.nbytes)
        kv = 2 * case * CONTEXT * spec.num_layers * spec.num_kv_heads * spec.head_dim * DTYPE.itemsize
        return Problem(
            peers=calls, check=check, tolerance=0.0, bytes=weights + kv, wall=True, repeats=9 if ON_GPU else 2,
            info={"logit_error": errors[0], "torch_logit_error": errors[1], "picks": picks, "context": CONTEXT},
        )  # fmt: skip

    measure(build)
