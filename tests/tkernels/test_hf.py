"""Patched transformers models against themselves unpatched: logits, generated tokens, and that nothing else changes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from hf_models import CONFIGS, batch, tiny
from torch import nn

from tkernels._op import reference_ops
from tkernels.hf import ATTENTION, attention, forwards, patch
from tkernels.hf.attention import DenseAttentionWarning


@pytest.fixture(autouse=True)
def _ops(monkeypatch: pytest.MonkeyPatch):
    """Whole models: on the CPU the references, since the interpreter is slow; the kernels have their own tests."""
    monkeypatch.setattr(forwards, "HOST_BOUND", 0)  # tiny models would run torch's operators in place of ours
    warnings.simplefilter("error", DenseAttentionWarning)  # the kernel path must be taken, except where a test says otherwise
    with reference_ops(), torch.no_grad():
        yield


def _logits(model: Any, **inputs: Any) -> torch.Tensor:
    return model(**inputs).logits


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_padded_batches(device: torch.device, name: str, side: str) -> None:
    model, inputs = tiny(name, device), batch(device, side)
    live = inputs["attention_mask"].bool()
    before = _logits(model, **inputs)
    report = patch(model)
    after = _logits(model, **inputs)
    torch.testing.assert_close(after[live], before[live], rtol=2e-5, atol=2e-5 * float(before.std()))
    assert report.dense_attention_calls == 0
    assert not report.left


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_of_few_tokens_run_torchs_fused_operators(device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host-bound steps: equal logits, prompt and decode, without a mask and without padding."""
    monkeypatch.undo()
    model, ids = tiny(name, device), batch(device)["input_ids"]
    options = dict(max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_logits=True)
    before, plain = model.generate(ids, attention_mask=torch.ones_like(ids), **options), _logits(model, input_ids=ids)
    report = patch(model)
    after = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(after.sequences, before.sequences)
    torch.testing.assert_close(torch.stack(after.logits), torch.stack(before.logits), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(_logits(model, input_ids=ids), plain, rtol=2e-5, atol=2e-5 * float(plain.std()))
    assert report.dense_attention_calls == 0


def test_one_query_over_every_key_takes_torchs_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its host time; with padding, a soft-cap or a shorter window the step stays with ours."""
    calls: list[str] = []
    sdpa, ours = torch.nn.functional.scaled_dot_product_attention, attention.padded_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: (calls.append("torch"), sdpa(*a, **k))[1])
    monkeypatch.setattr(attention, "padded_attention", lambda *a, **k: (calls.append("ours"), ours(*a, **k))[1])
    inputs = batch(device)
    whole, padded = torch.ones_like(inputs["attention_mask"]), inputs["attention_mask"]
    for name, mask, decode in (
        ("llama", whole, "torch"),
        ("llama", padded, "ours"),
        ("gemma2", whole, "ours"),
        ("mistral", whole, "torch"),
    ):
        model = tiny(name, device)
        patch(model)
        calls.clear()
        model.generate(inputs["input_ids"], attention_mask=mask, max_new_tokens=2, do_sample=False)
        assert calls == ["ours"] * 2 + [decode] * 2, name


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_is_as_near_to_fp32_as_the_model_itself(device: torch.device, name: str) -> None:
    """Tolerance from data: the unpatched bf16 model's own error against fp32."""
    model, inputs = tiny(name, device, torch.bfloat16), batch(device)
    live = inputs["attention_mask"].bool()
    exact = _logits(copy.deepcopy(model).float(), **inputs)[live]
    error = (_logits(model, **inputs)[live] - exact).norm()
    patch(model)
    after = _logits(model, **inputs)[live]
    assert after.dtype == torch.bfloat16
    assert (after - exact).norm() <= 1.5 * error


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_generated_tokens_of_a_left_padded_batch(device: torch.device, name: str, cache: str) -> None:
    model, inputs = tiny(name, device), batch(device)
    options = dict(max_new_tokens=9, do_sample=False, disable_compile=True, return_dict_in_generate=True, output_logits=True)
    if cache == "static":
        options["cache_implementation"] = "static"
    before = model.generate(**inputs, **options)
    report = patch(model)
    after = model.generate(**inputs, **options)
    assert torch.equal(after.sequences, before.sequences)
    torch.testing.assert_close(torch.stack(after.logits), torch.stack(before.logits), rtol=1e-4, atol=1e-4)
    assert report.dense_attention_calls == 0


def test_chunked_prefill_after_a_cached_prefix(device: torch.device) -> None:
    model = tiny("gemma2", device)
    ids = batch(device)["input_ids"]
    before = _logits(model, input_ids=ids)
    patch(model)
    first = model(ids[:, :9], use_cache=True)
    held = getattr(first, "cache", None) or first.past_key_values
    key = "cache" if hasattr(first, "cache") else "past_key_values"
    mask = torch.ones_like(ids)
    second = model(ids[:, 9:], attention_mask=mask, **{key: held})
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), before, rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_beam_search(device: torch.device, name: str) -> None:
    model, inputs = tiny(name, device), batch(device)
    before = model.generate(**inputs, max_new_tokens=5, num_beams=3, do_sample=False)
    patch(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, num_beams=3, do_sample=False), before)


PARTS = ["attention", "norm", "mlp", "rope", "linear"]


@pytest.mark.parametrize("part", PARTS)
def test_each_part_alone(device: torch.device, part: str) -> None:
    for name in ("qwen3", "phi3"):
        model, inputs = tiny(name, device), batch(device)
        live = inputs["attention_mask"].bool()
        before = _logits(model, **inputs)
        report = patch(model, **{other: other == part for other in PARTS})
        assert {entry.kind for entry in report.replaced} == {part}
        torch.testing.assert_close(_logits(model, **inputs)[live], before[live], rtol=2e-5, atol=5e-5)
        assert (model.config._attn_implementation == ATTENTION) == (part == "attention")


def test_patch_undo_patch(device: torch.device) -> None:
    model, inputs = tiny("gemma3", device), batch(device)
    before, config = _logits(model, **inputs), model.config
    classes, state = [type(m) for m in model.modules()], {k: v.data_ptr() for k, v in model.state_dict().items()}
    for _ in range(2):
        report = patch(model)
        assert report.active
        assert [m.__class__ for m in model.modules()] != classes
        assert {k: v.data_ptr() for k, v in model.state_dict().items()} == state
        report.undo()
        report.undo()  # a second time does nothing
        assert not report.active
        assert [m.__class__ for m in model.modules()] == classes
        assert model.config is config and all(m.config is config for m in model.modules() if hasattr(m, "config"))
        assert torch.equal(_logits(model, **inputs), before)


def test_two_models_of_one_config_one_patched(device: torch.device) -> None:
    config = CONFIGS["llama"]()
    config._attn_implementation = "eager"
    first, second = (transformers.LlamaForCausalLM(config).to(device).eval() for _ in range(2))
    assert first.config is second.config  # transformers shares it
    inputs = batch(device)
    before = _logits(second, **inputs)
    classes = [type(m) for m in second.modules()]
    file = transformers.models.llama.modeling_llama
    functions = dict(vars(file))
    report = patch(first)
    assert second.config._attn_implementation == "eager"
    assert [type(m) for m in second.modules()] == classes
    assert torch.equal(_logits(second, **inputs), before)
    assert dict(vars(file)) == functions
    report.undo()
    assert first.config is second.config


def test_a_copy_of_a_patched_model_is_patched_and_undone_by_itself(device: torch.device) -> None:
    model, inputs = tiny("llama", device), batch(device)
    report = patch(model)
    after = _logits(model, **inputs)
    other = copy.deepcopy(model)
    report.undo()
    assert torch.equal(_logits(other, **inputs), after)
    assert other.config._attn_implementation == ATTENTION


def test_patching_twice_is_reported(device: torch.device) -> None:
    model = tiny("qwen3", device)
    first, second = patch(model), patch(model)
    assert not second.replaced and {entry.why for entry in second.left} == {"already patched"}
    assert {entry.kind for entry in second.left} == {"attention", "rope", "norm", "mlp", "linear"}
    second.undo()
    assert model.config._attn_implementation == ATTENTION
    first.undo()


def test_undo_keeps_later_settings_and_says_what_it_cannot_restore(device: torch.device) -> None:
    model = tiny("llama", device)
    config = model.config
    report = patch(model)
    model.config.use_cache = False
    model.model.norm.__class__ = nn.Identity
    with pytest.raises(RuntimeError, match=r"undo: left as they are, because they were changed after patch\(\): Identity.__class__ \(1×\)"):
        report.undo()
    assert model.config is config and config.use_cache is False and config._attn_implementation == "eager"
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP" and "_tkernels_base" not in vars(type(model.model.layers[0].mlp))


def test_unknown_architecture_is_reported_not_guessed(device: torch.device) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)).to(device).eval()
    classes = [type(m) for m in model.modules()]
    report = patch(model)
    assert not report.replaced and not report.active
    assert report.left[0].why.startswith("unknown architecture 'gpt2'; known: llama, mistral")
    assert [type(m) for m in model.modules()] == classes
    assert "nothing was replaced" in str(report)


def test_only_a_transformers_model_is_taken() -> None:
    with pytest.raises(TypeError, match=r"model: expected a transformers PreTrainedModel, got torch\.nn\.modules\.linear\.Linear"):
        patch(nn.Linear(2, 2))


class _OtherNorm(transformers.models.llama.modeling_llama.LlamaRMSNorm):
    pass


def test_what_is_not_exactly_known_is_left(device: torch.device) -> None:
    model, inputs = tiny("llama", device), batch(device)
    model.model.layers[1].input_layernorm.__class__ = _OtherNorm
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    hooked = model.model.layers[1].mlp
    hooked.forward = lambda x: type(hooked).forward(hooked, x) * 1.0
    before = _logits(model, **inputs)
    report = patch(model)
    why = {entry.where[0]: (entry.kind, entry.why) for entry in report.left}
    assert why == {
        "model.layers.1.input_layernorm": ("norm", "a _OtherNorm, which may compute something else"),
        "model.layers.0.mlp": ("mlp", "no kernel for the activation ReLU"),
        "model.layers.1.mlp": ("mlp", "its forward was replaced on the instance (by accelerate's hooks, say)"),
    }
    live = inputs["attention_mask"].bool()
    torch.testing.assert_close(_logits(model, **inputs)[live], before[live], rtol=2e-5, atol=5e-5)
    text = str(report)
    assert "norm      left: 1 × model.layers.*.input_layernorm: a _OtherNorm" in text
    assert "4 × LlamaRMSNorm → tkernels.rms_norm" in text


def test_rope_needs_every_attention_module(device: torch.device) -> None:
    """The rotary module speaks to all layers: one that cannot be replaced keeps all of them as they are."""
    model, inputs = tiny("qwen3", device), batch(device)
    model.model.layers[1].self_attn.q_norm.register_forward_hook(lambda module, args, out: out)
    before = _logits(model, **inputs)
    report = patch(model)
    reasons = [entry.why for entry in report.left if entry.kind == "rope"]
    assert reasons == [
        "its QK-norm has hooks, which the fused kernel would pass by",
        "the attention and rotary modules of a model are replaced together, and some cannot be",
    ]
    live = inputs["attention_mask"].bool()
    torch.testing.assert_close(_logits(model, **inputs)[live], before[live], rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_masks_that_the_kernels_do_not_take_are_right_warned_of_and_counted(device: torch.device, name: str) -> None:
    model, inputs = tiny(name, device), batch(device)
    ids = inputs["input_ids"]
    holed = torch.ones_like(ids)
    holed[1, 4:6] = 0
    custom = torch.ones(3, 1, 12, 12, dtype=torch.bool, device=device).tril()
    custom[:, :, :, 3] = False
    custom[:, :, 3, 3] = True
    additive = torch.where(custom, 0.0, torch.finfo(torch.float32).min)
    restart = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], device=device).expand(3, -1)
    cases = {
        "hole": dict(attention_mask=holed),
        "the caller's matrix": dict(attention_mask=additive),
        "packed": dict(position_ids=restart, use_cache=False),
    }
    before = {case: _logits(model, input_ids=ids, **arguments) for case, arguments in cases.items()}
    report = patch(model)
    for case, arguments in cases.items():
        calls = report.dense_attention_calls
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", DenseAttentionWarning)
            after = _logits(model, input_ids=ids, **arguments)
        live = arguments["attention_mask"].bool() if case == "hole" else torch.ones_like(ids).bool()
        torch.testing.assert_close(after[live], before[case][live], rtol=5e-5, atol=1e-4, msg=case)
        assert report.dense_attention_calls == calls + 2, case
        assert [w.category for w in seen] == ([] if case == "the caller's matrix" else [DenseAttentionWarning] * len(seen))
        assert bool(seen) == (case != "the caller's matrix")
    assert "6 times through transformers' SDPA" in str(report)


def test_a_mask_shorter_than_the_cache_is_refused(device: torch.device) -> None:
    model = tiny("llama", device)
    patch(model)
    first = model(torch.ones(1, 4, dtype=torch.long, device=device), use_cache=True)
    key = "cache" if hasattr(first, "cache") else "past_key_values"
    one = torch.ones(1, 1, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match=r"attention_mask: expected 5 columns \(cached tokens and new ones\), got \[1, 1\]"):
        model(one, attention_mask=one, **{key: getattr(first, key)})


def test_training_is_refused(device: torch.device) -> None:
    model = tiny("llama", device)
    patch(model)
    ids = batch(device)["input_ids"]
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="is inference-only and has no backward"):
        _logits(model, input_ids=ids).sum().backward()
    model.train()
    model.model.layers[0].self_attn.attention_dropout = 0.5
    with pytest.raises(NotImplementedError, match=r"dropout: expected 0, the kernels are for inference, got 0.5; call model.eval\(\)"):
        _logits(model, input_ids=ids)


def test_saved_and_loaded_like_any_model(device: torch.device, tmp_path: Any) -> None:
    model = tiny("llama", device)
    patch(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].to(device), tensor)


def test_hidden_states_and_hooks_still_work(device: torch.device) -> None:
    model, inputs = tiny("llama", device), batch(device)
    seen: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.append(out.shape[-1]))
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, out: seen.append(out.shape[-1]))
    before = model(**inputs, output_hidden_states=True).hidden_states
    patch(model)
    after = model(**inputs, output_hidden_states=True).hidden_states
    assert len(after) == len(before) == 3 and seen == [32, 32] * 2
    live = inputs["attention_mask"].bool()
    torch.testing.assert_close(after[-1][live], before[-1][live], rtol=2e-5, atol=5e-5)


def test_gemma3_inside_a_vision_model_leaves_the_vision_tower(device: torch.device) -> None:
    config = transformers.Gemma3Config(
        text_config=CONFIGS["gemma3"]().to_dict(),
        vision_config=dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4),
        mm_tokens_per_image=4, image_token_index=95, boi_token_index=94, eoi_token_index=93,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config).to(device).eval()
    inputs = batch(device)
    inputs["input_ids"].clamp_(max=90)
    before = _logits(model, **inputs)
    report = patch(model)
    live = inputs["attention_mask"].bool()
    torch.testing.assert_close(_logits(model, **inputs)[live], before[live], rtol=5e-5, atol=5e-5)
    assert not any("vision" in name for entry in report.replaced for name in entry.where)
    assert model.config.vision_config._attn_implementation == "eager"
    assert model.config.text_config is model.model.language_model.config
    report.undo()
    assert torch.equal(_logits(model, **inputs), before)
