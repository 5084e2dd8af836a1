"""transformers' generate() on a Llama-1B-shaped model: as it is, patched by tkernels.hf, patched by Liger. Time per generated token.

"dynamic" is generate() as people call it; "static, compiled" is its fastest mode: a static cache and torch.compile, with CUDA graphs of
torch's own, which two models in one process cannot replay in turns (an assertion in torch 2.11): there the peers run one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bench.harness import relative_error
from bench.peers import LIGER, OURS
from bench.shapes import LLAMA_1B, TINY
from bench.suite import DEVICE, DTYPE, ON_GPU, Problem, sizes
from tkernels._op import reference_ops

transformers = pytest.importorskip("transformers")
PLAIN = "torch, unpatched"
PROMPT, NEW = sizes([64, 64], [6, 4])
# compiling takes half a minute for each peer
CASES = sizes([("dynamic", 1), ("dynamic", 8), ("static, compiled", 1)], [("dynamic", 2)])


@functools.cache
def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(LLAMA_1B if ON_GPU else TINY))
    with torch.device(DEVICE):
        return transformers.LlamaForCausalLM(config).to(DTYPE).state_dict()


def _model() -> Any:
    config = transformers.LlamaConfig(**(LLAMA_1B if ON_GPU else TINY), attn_implementation="sdpa")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to(DTYPE).to_empty(device=DEVICE).eval()
    model.load_state_dict(_state())
    with torch.device(DEVICE):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its buffers are not part of the state
    return model


@contextmanager
def _globals(module: Any, names: dict[str, Any]) -> Iterator[None]:
    """Liger replaces functions of the model's file, which every model in the process uses: only while its model runs."""
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _liger() -> tuple[Any, Callable[[], Any]]:
    """(model, context in which it must run)."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    model, before = _model(), dict(vars(modeling_llama))
    forward = modeling_llama.LlamaForCausalLM.forward
    apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, model=model)
    changed = {name: value for name, value in vars(modeling_llama).items() if before.get(name) is not value}
    for name in changed:
        setattr(modeling_llama, name, before[name])
    assert modeling_llama.LlamaForCausalLM.forward is forward
    return model, lambda: _globals(modeling_llama, changed)


@pytest.fixture(autouse=True)
def _ops() -> Any:
    with reference_ops():
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, batch {case[1]}")
@pytest.mark.parametrize("peer", [PLAIN, OURS, LIGER])
def test_generate(measure: Any, case: tuple[str, int], peer: str) -> None:
    from tkernels.hf import patch

    mode, batch = case

    def build() -> Problem:
        plain, patched = _model(), _model()
        report = patch(patched)
        assert not report.left, report
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, plain.config.vocab_size, (batch, PROMPT), generator=generator).to(DEVICE)
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        if mode.startswith("static"):
            options["cache_implementation"] = "static"
        with torch.no_grad():
            expected = plain(ids).logits.float()

        def run(model: Any, context: Callable[[], Any]) -> Callable[[int], torch.Tensor]:
            def call(_: int) -> torch.Tensor:
                with context():
                    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)

            return call

        def nothing() -> Any:
            return _globals(transformers, {})

        models = {PLAIN: (plain, nothing), OURS: (patched, nothing)}
        calls = {name: run(*entry) for name, entry in models.items()}

        def with_liger() -> tuple[Any, Callable[[], Any]]:
            if LIGER not in models:
                models[LIGER] = _liger()
            return models[LIGER]

        calls[LIGER] = lambda i: run(*with_liger())(i)

        def check(name: str, out: torch.Tensor) -> float:
            """Logits against the unpatched model's: random weights tie too often in bf16 to compare tokens."""
            assert out.shape == (batch, PROMPT + NEW)
            model, context = models[name]
            with context():
                return relative_error(model(ids).logits.float(), expected)

        return Problem(
            peers=calls, check=check, tolerance=3e-2 if ON_GPU else 1e-5, wall=True, units=NEW, apart=mode.startswith("static"),
            repeats=4 if ON_GPU else 1,
            info={"prompt": PROMPT, "new_tokens": NEW, "batch": batch, "transformers": transformers.__version__},
        )  # fmt: skip

    measure(build)
