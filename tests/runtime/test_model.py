"""The model against transformers: every family and rope scaling, one-shot and chunked prefill, decode, mixed batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from runtime.model import CausalLM, ModelSpec, SpecError, allocate_cache, random_model, resolve_device, resolve_dtype
from tests.runtime.paged import PagedModel

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA, MISTRAL, QWEN2, QWEN3 = ({**BASE, "model_type": name} for name in ("llama", "mistral", "qwen2", "qwen3"))
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-multi-query": {**LLAMA, "num_key_value_heads": 1},
    "llama-no-kv-heads-key": {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "head_dim")},
    "llama-biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama-head-dim-of-its-own": {**LLAMA, "head_dim": 24},
    "smollm2": {**LLAMA, "hidden_size": 96, "num_attention_heads": 6, "tie_word_embeddings": True, "rope_theta": 100000.0},
    "mistral-no-window": {**MISTRAL, "sliding_window": None},
    "mistral-window": {**MISTRAL, "sliding_window": 5},
    "mistral-window-1": {**MISTRAL, "sliding_window": 1},
    "qwen2": QWEN2,
    "qwen2-tied": {**QWEN2, "tie_word_embeddings": True},
    "qwen2-window-from-layer-1": {**QWEN2, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen2-layer-types": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3": {**QWEN3, "head_dim": 32},
    "qwen3-bias-window": {**QWEN3, "attention_bias": True, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]}
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_theta": 500.0},
    "theta-new-key": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"max_position_embeddings": 16, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "dynamic": {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "llama3": {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3", **_LLAMA3}},
    "llama3-new-key": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **_LLAMA3}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn-old-key-no-original": {"max_position_embeddings": 16, "rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True}},
    "yarn-mscale": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "beta_fast": 4,
            "beta_slow": 0.5,
            "truncate": False,
        }
    },
    "yarn-attention-factor": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "rope_theta": 1e4}},
    "longrope": {"original_max_position_embeddings": 16, "rope_scaling": {"type": "longrope", **_LONG}},
    "longrope-factor": {
        "rope_scaling": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16, **_LONG},
    },
}
CASES = {**FAMILIES, **{f"rope-{name}": {**LLAMA, **keys} for name, keys in ROPES.items()}}


class Oracle:
    """transformers on the same weights, one sequence at a time, fed in the same chunks."""

    def __init__(self, model: CausalLM, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        hf_config = AutoConfig.for_model(**copy.deepcopy(config))
        self.hf = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").to(model.embed_tokens.device, dtype).eval()
        loaded = self.hf.load_state_dict(model.hf_state_dict(), strict=False)
        assert not loaded.unexpected_keys and set(loaded.missing_keys) <= ({"lm_head.weight"} if model.spec.tied else set())

    @torch.no_grad()
    def __call__(self, chunks: list[list[int]]) -> torch.Tensor:
        """Logits [tokens, vocab] of one sequence, whole; given in ``chunks`` only where the scaling depends on the length so far."""
        device, rotary = self.hf.device, self.hf.model.rotary_emb
        if rotary.rope_type not in ("dynamic", "longrope"):
            return self.hf(input_ids=torch.tensor([[t for chunk in chunks for t in chunk]], device=device), use_cache=False).logits[0]
        self.hf.model.rotary_emb = type(rotary)(self.hf.config).to(device)  # it remembers the longest sequence it has seen
        cache = DynamicCache(config=self.hf.config)
        return torch.cat([self.hf(input_ids=torch.tensor([c], device=device), past_key_values=cache).logits[0] for c in chunks])


def tolerance(config: dict[str, Any], model: CausalLM, chunks: list[list[int]]) -> float:
    """Twice the error of transformers in fp32 against fp64, and no less than a few roundings of the largest logit."""
    wide, narrow = Oracle(model, config, torch.float64)(chunks), Oracle(model, config)(chunks)
    return max(2 * (narrow - wide).abs().max().item(), 16 * torch.finfo(torch.float32).eps * wide.abs().max().item())


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 199, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def split(values: list[int], *lengths: int) -> list[list[int]]:
    assert sum(lengths) == len(values)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [values[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, device: torch.device) -> None:
    """One sequence in one piece, one in chunks that end inside pages, one decoded from its first token: all in the same steps."""
    config = CASES[name]
    model = random_model(config, seed=3, device=device)
    paged = PagedModel(model)
    whole = [tokens(33, 1)] + [[t] for t in tokens(3, 2)]
    chunked = split(tokens(29, 3), 6, 11, 5, 7)
    decoded = [[t] for t in tokens(4, 4)]
    steps = [paged.step({"a": a, "b": b, "c": c}) for a, b, c in zip(whole, chunked, decoded, strict=True)]
    oracle = Oracle(model, config)
    for key, chunks in (("a", whole), ("b", chunked), ("c", decoded)):
        got, expected = torch.cat([step[key] for step in steps]), oracle(chunks)
        assert (got - expected).abs().max().item() <= tolerance(config, model, chunks), key


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window-from-layer-1", "rope-yarn", "rope-llama3", "qwen3"])
def test_the_comparison_sees_what_a_case_is_about(name: str, device: torch.device) -> None:
    """Dropping the window, the scaling or the QK-norm moves the logits by far more than the tolerance, or the cases prove nothing."""
    config = CASES[name]
    plain = {**config, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None}
    if name == "qwen3":
        plain["model_type"] = "llama"
    chunks = [tokens(33, 1)]
    model, other = random_model(config, seed=3, device=device), random_model(plain, seed=3, device=device)
    weights = model.hf_state_dict()
    for key, view in other.hf_state_dict().items():
        view.copy_(weights[key])
    a, b = (PagedModel(m).step({"a": chunks[0]})["a"] for m in (model, other))
    assert (a - b).abs().max().item() > 100 * tolerance(config, model, chunks)


@pytest.mark.parametrize("name", ["llama", "qwen3", "smollm2"])
def test_bf16_errs_no_more_than_transformers(name: str, device: torch.device) -> None:
    """Against fp32 on the same rounded weights: at most twice the error of transformers in bf16."""
    config, chunk = CASES[name], tokens(40, 5)
    model = random_model(config, seed=3, dtype="bfloat16", device=device)
    exact = Oracle(model, config, torch.float32)([chunk])
    theirs = (Oracle(model, config, torch.bfloat16)([chunk]).float() - exact).abs().max().item()
    ours = (PagedModel(model).step({"a": chunk})["a"].float() - exact).abs().max().item()
    assert 0 < ours <= 2 * theirs


@pytest.mark.parametrize("name", ["llama", "rope-dynamic", "rope-longrope"])
def test_padding_changes_nothing(name: str, device: torch.device) -> None:
    """Padding tokens and padding rows leave logits and every byte of the cache as they are."""
    config = CASES[name]
    model = random_model(config, seed=3, device=device)
    results, caches = [], []
    for padding in ({}, {"pad_tokens": 5, "pad_seqs": 3}):
        paged = PagedModel(model)
        paged.step({"a": tokens(9, 1), "b": tokens(22, 2)})
        results.append(torch.cat(list(paged.step({"b": [3], "a": [5], "c": [7]}, **padding).values())))
        caches.append([cache.clone() for cache in paged.caches])
    limit = tolerance(config, model, [tokens(22, 2), [3]])
    assert (results[0] - results[1]).abs().max().item() <= limit
    for plain, padded in zip(*caches, strict=True):
        assert torch.equal(plain.isnan(), padded.isnan())
        assert (plain - padded).nan_to_num().abs().max().item() <= limit


def test_max_query_len_is_only_a_bound(device: torch.device) -> None:
    model = random_model(LLAMA, seed=3, device=device)
    exact, bucketed = PagedModel(model), PagedModel(model)
    for chunk in ({"a": tokens(7, 1)}, {"a": [5], "b": [9]}):
        assert torch.equal(exact.step(chunk)["a"], bucketed.step(chunk, max_query_len=8)["a"])


def test_a_sequence_does_not_feel_its_neighbours_length(device: torch.device) -> None:
    """transformers switches longrope for the whole batch once one sequence is long; here each sequence has its own."""
    config = CASES["rope-longrope"]
    model = random_model(config, seed=3, device=device)
    short, long = tokens(8, 1), tokens(40, 2)
    together = PagedModel(model).step({"short": short, "long": long})
    oracle, limit = Oracle(model, config), tolerance(config, model, [long])
    assert (together["short"] - oracle([short])).abs().max().item() <= limit
    assert (together["long"] - oracle([long])).abs().max().item() <= limit


@pytest.mark.parametrize("name", ["llama", "rope-dynamic", "rope-longrope"])
def test_a_step_without_tokens(name: str, device: torch.device) -> None:
    """Nothing in, nothing out, of the right shape."""
    paged = PagedModel(random_model(CASES[name], seed=3, device=device))
    assert paged.step({}) == {}
    assert paged.last_logits.shape == (0, 199)


@pytest.mark.parametrize("name", ["smollm2", "qwen3-bias-window", "rope-dynamic", "rope-longrope"])
def test_compiles_as_one_graph(name: str, device: torch.device) -> None:
    model = random_model(CASES[name], seed=3, device=device)
    plain, compiled = PagedModel(model), PagedModel(model)
    compiled.run = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for step in ({"a": tokens(9, 1), "b": tokens(20, 2)}, {"a": [3], "b": [4]}):
        expected = plain.step(step)
        got = compiled.step(step)
        for key in step:
            assert torch.equal(got[key], expected[key])


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["smollm2", "qwen3-bias-window"])
def test_equals_transformers_on_the_kernels(name: str, device: torch.device) -> None:
    """The same through the Triton kernels (interpreted on the CPU), small: a chunked prefill beside a decode."""
    config = {**CASES[name], "num_hidden_layers": 1, "vocab_size": 199}
    model = random_model(config, seed=3, device=device)
    paged = PagedModel(model)
    steps = [paged.step({"a": tokens(6, 1), "b": [7]}), paged.step({"a": tokens(5, 2), "b": [8]}, pad_tokens=1, pad_seqs=1)]
    for key, chunks in (("a", [tokens(6, 1), tokens(5, 2)]), ("b", [[7], [8]])):
        got = torch.cat([step[key] for step in steps])
        assert (got - Oracle(model, config)(chunks)).abs().max().item() <= tolerance(config, model, chunks)


def test_an_fp8_cache_holds_the_rounded_values(device: torch.device) -> None:
    """The first layer's pages are those of an fp32 cache, rounded; the logits move by the rounding and no more."""
    model, chunk = random_model(LLAMA, seed=3, device=device), tokens(20, 1)
    exact, rounded = PagedModel(model), PagedModel(model, dtype="fp8_e4m3")
    expected = exact.step({"a": chunk})["a"]
    got = rounded.step({"a": chunk})["a"]
    for wide, narrow in zip(exact.caches[:2], rounded.caches[:2], strict=True):
        assert narrow.dtype == torch.float8_e4m3fn
        assert torch.equal(wide.to(torch.float8_e4m3fn).float().nan_to_num(-1), narrow.float().nan_to_num(-1))
    assert 0 < (got - expected).abs().max().item() < 2**-3 * expected.abs().max().item()  # e4m3 rounds by up to 2**-4


def test_only_the_wanted_rows_reach_the_head(device: torch.device) -> None:
    model = random_model(LLAMA, seed=3, device=device)
    every = PagedModel(model).step({"a": tokens(9, 1)})["a"]
    paged = PagedModel(model)
    paged.rows = [8, 2]
    paged.step({"a": tokens(9, 1)})
    assert paged.last_logits.shape == (2, 199)
    assert (paged.last_logits - every[[8, 2]]).abs().max().item() <= tolerance(LLAMA, model, [tokens(9, 1)])


def test_weights_are_shared_not_copied(device: torch.device) -> None:
    """Fused projections and tied embeddings take no second copy."""
    model = random_model(CASES["smollm2"], seed=3, device=device)
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in model.hf_state_dict().values()}
    count = sum(view.numel() for view in model.hf_state_dict().values())
    assert sum(storages.values()) == 4 * count
    assert {parameter.untyped_storage().data_ptr() for parameter in model.parameters()} == set(storages)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_random_weights_are_a_function_of_the_seed(device: torch.device) -> None:
    first, again, other = (random_model(QWEN3, seed=seed, device=device).hf_state_dict() for seed in (1, 1, 2))
    rounded = random_model(QWEN3, seed=1, dtype=torch.bfloat16, device=device).hf_state_dict()
    for name, view in first.items():
        assert torch.equal(view, again[name]) and not torch.equal(view, other[name])
        assert torch.equal(view.bfloat16(), rounded[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: expected one of llama, mistral, qwen2, qwen3, got 'gpt2'"),
        ({"model_type": None}, "model_type: expected"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a positive integer, got 0"),
        ({"vocab_size": "many"}, "vocab_size: expected a positive integer, got 'many'"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads: expected a divisor of num_attention_heads \(4\), got 3"),
        ({"head_dim": 15}, "head_dim: expected an even number"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: "),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
        ({"dtype": "float64"}, "dtype: expected one of float32"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0"),
        ({"rope_scaling": {"type": "xpos", "factor": 2.0}}, "rope_scaling.rope_type: expected one of default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor: expected a positive number, got '2'"),
        ({"rope_scaling": {"type": "linear", "factr": 2.0}}, "rope_scaling.factr: unknown for rope_type 'linear'; did you mean factor"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters.full_attention: rotary parameters by",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters.high_freq_factor: missing"),
        ({"rope_scaling": {"type": "longrope", **_LONG, "long_factor": [1.0]}}, "rope_scaling.long_factor: expected a list of 8 numbers"),
        ({"rms_norm_eps": None}, "rms_norm_eps: expected a number of at least 0, got None"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: expected a number of at least 0, got '1e-5'"),
        ({"model_type": "qwen2", "max_window_layers": None}, "max_window_layers: expected a number of at least 0, got None"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window: expected a positive integer, got 0"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types: expected a list of 2"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "chunked"]}, r"layer_types\[1\]: expected 'full_attention'"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
            r"layer_types\[0\]: 'sliding_attention' without",
        ),
        ({"model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"] * 2}, r"layer_types\[0\]: 'full_attention', but"),
    ],
)
def test_a_config_that_cannot_run_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ModelSpec.from_config({**LLAMA, **change})


def test_no_cache_no_step(device: torch.device) -> None:
    one, none = torch.ones(1, dtype=torch.int64, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match=r"no KV cache: call model\.bind_cache"):
        random_model(LLAMA, device=device)(one, one, one, none, none[0], none[0], one, 1)


def test_a_cache_that_does_not_fit_is_refused(device: torch.device) -> None:
    model = random_model(LLAMA, device=device)
    good = allocate_cache(model.spec, 4, 8, device=device)
    shared = torch.zeros(2, 4, 8, 2, 16, device=device)
    cases = [
        (good[:1], "caches: expected 2 pairs, one a layer, got 1"),
        ([good[0], (good[1][0], good[1][1][:3])], r"caches\[1\].v: expected \[4, 8, 2, 16\]"),
        ([good[0], (good[1][0], good[1][1].half())], r"caches\[1\].v: expected .* like caches\[0\].k"),
        ([good[0], (good[1][0][:, :, :1], good[1][1])], r"caches\[1\].k: expected \[pages, page_size, 2, 16\]"),
        ([good[0], (shared[0], shared[1])], r"caches\[1\].v: shares its storage with caches\[1\].k"),
        ([good[0], (good[1][0].to("meta"), good[1][1])], r"caches\[1\].k: expected a tensor on"),
    ]
    for caches, message in cases:
        with pytest.raises(ValueError, match=message):
            model.bind_cache(caches)
    model.bind_cache(good)
    assert "k_cache" not in str(model.state_dict().keys())
    with pytest.raises(ValueError, match="num_pages: expected 1 or more, got 0"):
        allocate_cache(model.spec, 0, 8, device=device)


def test_a_device_or_dtype_that_is_not_there_is_said() -> None:
    for name in ("tpu", "meta", "cuda:x"):
        with pytest.raises(ValueError, match=f'device: expected "auto", "cpu", "cuda" or "cuda:N", got {name!r}'):
            resolve_device(name)
    with pytest.raises(ValueError, match=r"device: expected .* of? this machine|device: expected cuda:0"):
        resolve_device("cuda:99")
    with pytest.raises(ValueError, match="dtype: expected \"auto\" or one of float32, float16, bfloat16, got 'fp8_e4m3'"):
        resolve_dtype("fp8_e4m3", torch.float32, torch.device("cpu"))
    assert resolve_dtype("auto", torch.bfloat16, torch.device("cpu")) == torch.float32
    assert resolve_dtype("float16", torch.bfloat16, torch.device("cpu")) == torch.float16


def test_a_dtype_that_the_gpu_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which GPU there is is the only thing pretended: an sm_70 has neither bf16 nor fp8."""
    from runtime import model
    from tkernels._target import Target

    monkeypatch.setattr(model, "target_of", lambda device: Target("sm_70", 80, has_fp8=False))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    gpu = torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"dtype: bfloat16 needs an sm_80 or newer GPU, this one .* is sm_70; use float16"):
        resolve_dtype("bfloat16", torch.float32, gpu)
    with pytest.raises(ValueError, match="dtype: bfloat16 needs"):
        resolve_dtype("auto", torch.bfloat16, gpu)
    assert resolve_dtype("float16", torch.bfloat16, gpu) == torch.float16
    with pytest.raises(ValueError, match="dtype: fp8_e4m3 needs an sm_89"):
        model._check_device_has(torch.float8_e4m3fn, gpu)


def test_positions_reach_as_far_as_the_scaling() -> None:
    reach = {name: ModelSpec.from_config(CASES[f"rope-{name}"]).max_positions for name in ROPES}
    assert reach["linear"] == 40 and reach["dynamic"] == 64 and reach["yarn"] == 64 and reach["yarn-old-key-no-original"] == 64
    assert reach["llama3"] == 64 and reach["longrope"] == 64
