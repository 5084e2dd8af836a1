"""The engine against transformers on a GPU, on a model of SmolLM2's shape with seeded random weights."""

from __future__ import annotations

import pytest
import torch
import transformers

from runtime import Engine, SamplingParams
from runtime.model import allocate_cache, random_model

pytestmark = pytest.mark.gpu

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
LENGTHS = (1, 2, 15, 16, 17, 63, 257, 600, 1023, 1100)  # tokens
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, SMOLLM2["vocab_size"], (n,), generator=generator).tolist() for n in LENGTHS]


def _transformers(model, dtype: torch.dtype):
    config = transformers.LlamaConfig(**{k: v for k, v in SMOLLM2.items() if k != "model_type"}, attn_implementation="eager")
    with torch.device("cuda"):
        peer = transformers.LlamaForCausalLM(config).to(dtype).eval()
    peer.load_state_dict({k: v.to(dtype) for k, v in model.hf_state_dict().items()}, strict=False)
    peer.tie_weights()
    return peer


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    torch.backends.cuda.matmul.allow_tf32 = False
    peer = _transformers(random_model(SMOLLM2, seed=5, dtype=torch.float32, device="cuda"), torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = peer.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("mode", ["eager", "piecewise", "full", "auto"])
@pytest.mark.parametrize("scarce", [False, True], ids=["plenty", "scarce"])
def test_greedy_tokens_equal_transformers_in_fp32(prompts, expected, mode, scarce):
    config = {
        "graph": {"mode": mode, "max_tokens": 128, "capture_sizes": [1, 2, 4, 8, 16, 128]},
        "scheduler": {"max_num_seqs": 3 if scarce else 16, "max_batch_tokens": 128 if scarce else 512},
        "cache": {"num_pages": 1 + 2 * -(-(max(LENGTHS) + NEW_TOKENS) // 16) if scarce else 512, "prefix_cache": False},
        "compile": {"backend": "eager"},
        "model": {"device": "cuda"},
    }
    engine = Engine(random_model(SMOLLM2, seed=5, dtype=torch.float32, device="cuda"), config)
    completions = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    for length, completion, answer in zip(LENGTHS, completions, expected, strict=True):
        assert completion.token_ids == answer, f"prompt of {length} tokens"


def test_bf16_logits_are_within_twice_the_error_of_transformers(prompts):
    wide = random_model(SMOLLM2, seed=5, dtype=torch.float32, device="cuda")
    reference = _transformers(wide, torch.float32)
    narrow = _transformers(wide, torch.bfloat16)
    model = random_model(SMOLLM2, seed=5, dtype=torch.bfloat16, device="cuda")
    model.load_state_dict(
        {k: v.to(torch.bfloat16) for k, v in wide.state_dict().items() if v.is_floating_point() and k in model.state_dict()}, strict=False
    )
    page_size = 16
    for prompt in prompts:
        pages = -(-len(prompt) // page_size)
        model.bind_cache(allocate_cache(model.spec, pages + 1, page_size, torch.bfloat16, "cuda"))
        ids = torch.tensor(prompt, device="cuda")
        positions = torch.arange(len(prompt), device="cuda")
        table = torch.arange(1, pages + 1, dtype=torch.int32, device="cuda")[None]
        ends = torch.tensor([0, len(prompt)], dtype=torch.int32, device="cuda")
        with torch.inference_mode():
            logits = model(
                ids,
                positions,
                positions + page_size,
                table,
                ends[1:].clone(),
                ends,
                torch.tensor([len(prompt) - 1], device="cuda"),
                len(prompt),
            )
            exact = reference(ids[None]).logits[0, -1]
            theirs = narrow(ids[None]).logits[0, -1]
        ours = (logits[0].float() - exact).abs().max()
        assert ours <= 2 * (theirs.float() - exact).abs().max(), f"prompt of {len(prompt)} tokens"
