"""The engine at its start: configurations, checkpoints and sampling parameters, and what is said of wrong ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.config import ConfigError
from runtime.engine import Engine
from runtime.model import CheckpointError
from runtime.request import SamplingParams
from runtime.rotary import SpecError
from tests.runtime.engine_rig import config, make_engine
from tests.runtime.test_text import TEMPLATE, byte_tokenizer
from tests.runtime.tiny import CONFIG, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder as Hugging Face writes one."""
    path = tmp_path_factory.mktemp("checkpoint")
    model = tiny_model(torch.device("cpu"))
    save_file({name: view.clone() for name, view in model.hf_state_dict().items() if name != "lm_head.weight"}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 256]}))
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def test_end_of_sequence_stops_unless_ignored(device: torch.device, folder: Path) -> None:
    plain = make_engine(device).generate([[1]], SamplingParams(max_tokens=40))[0].token_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [plain[20], 256]}))
    engine = Engine(folder, config(model={"device": device.type, "dtype": "float32"}))
    first = plain.index(plain[20])
    answer = engine.generate([[1]], SamplingParams(max_tokens=40))[0]
    assert (answer.token_ids, answer.finish_reason) == (plain[: first + 1], "stop")
    answer = engine.generate([[1]], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    assert (answer.token_ids, answer.finish_reason) == (plain, "length")


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1), ("top_p", 0), ("top_p", 1.5),
     ("max_tokens", 0), ("seed", -1), ("stop", ""), ("stop", ["a", ""]), ("top_q", 1)],
)  # fmt: skip
def test_sampling_parameters_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"grap": {}}, "grap: unknown key; did you mean graph"),
        ({"graph": {"mod": "full"}}, "graph.mod: unknown key; did you mean graph.mode"),
        ({"cache": {"num_pages": 1}}, "cache.num_pages: expected at least 2"),
        ({"cache": {"page_size": 0}}, "cache.page_size"),
        ({"cache": {"page_size": 257}}, "cache.page_size: expected at most 256, .* got 257"),
        (
            {"cache": {"num_pages": 10**12}},
            r"cache.num_pages: 1000000000000 pages of cache.page_size = 16 tokens take \d+\.\d GiB, which cpu",
        ),
        ({"cache": {"num_pages": 10**19}}, r"cache.num_pages: 10000000000000000000 pages of cache.page_size = 16 tokens take"),
        ({"scheduler": {"max_num_seqs": 8193, "max_batch_tokens": 8193}}, "scheduler.max_num_seqs: expected at most 8192, .* got 8193"),
        ({"cache": {"dtype": "float16"}}, 'cache.dtype: expected "auto", the model\'s "float32" or "fp8_e4m3", got "float16"'),
        ({"scheduler": {"max_num_seqs": 0}}, "scheduler.max_num_seqs"),
        ({"parallel": {"tensor": 2}}, "parallel.tensor"),
        ({"scheduler": {"max_context": 3000}}, "scheduler.max_context: expected at most the model's 2048, got 3000"),
    ],
)
def test_a_wrong_configuration_names_its_key(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(tiny_model(torch.device("cpu")), sections)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (5, "config: expected a TOML file, a mapping of sections or a RuntimeConfig, got 5"),
        ({"graph": {"memory_budget": "9" * 400 + ".0"}}, f"graph.memory_budget: expected at most {2**63 - 1} bytes, got {'9' * 40}…"),
        ({"graph": {"memory_budget": 2**63}}, "graph.memory_budget: input should be less than or equal to"),
        ({"graph": {"max_tokens": True}}, "graph.max_tokens: expected a number, got True"),
        ({"graph": {"capture_sizes": [True]}}, 'graph.capture_sizes: expected "auto" or a list of positive integers, got [True]'),
        ({"scheduler": {"itl_ms": False}}, "scheduler.itl_ms: expected a number, got False"),
        ({"compile": {"compile_sizes": [True]}}, "compile.compile_sizes: expected numbers, got [True]"),
        ({"model": {"path": True}}, "model.path: input should be a valid string, got True"),
        ({"graph": {"mode": False}}, "graph.mode: input should be 'auto', 'full', 'piecewise' or 'eager', got False"),
        ({"graph": True}, "graph: expected a section, [graph] with keys below it, got True"),
        ({"graph": {"capture_sizes": "all"}}, "graph.capture_sizes: expected \"auto\" or a list of positive integers, got 'all'"),
        ({"graph": {"full_sizes": [0, -1]}}, 'graph.full_sizes: expected "auto" or a list of positive integers, got [0, -1]'),
        ({"cache": {"num_pages": 1.5}}, 'cache.num_pages: expected "auto" or a positive integer, got 1.5'),
    ],
)
def test_a_wrong_value_is_said_in_one_line(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}[^;]*$"):
        Engine(tiny_model(torch.device("cpu")), source)


def test_a_cost_table_that_cannot_be_written_is_said_before_the_warm_up(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in ((tmp_path, "is a folder, expected a file"), (tmp_path / "file" / "costs.json", "file is not a folder")):
        with pytest.raises(ConfigError, match=f"graph.cost_table: {path}: .*{message}"):
            make_engine(torch.device("cpu"), graph={"cost_table": str(path), "mode": "eager"})
    path = tmp_path / "new" / "costs.json"
    make_engine(torch.device("cpu"), graph={"cost_table": str(path), "mode": "eager"})
    assert path.is_file()


def test_an_end_of_sequence_that_is_no_token_is_said_before_the_weights_are_read(folder: Path, tmp_path: Path) -> None:
    for value in ("a", [1, None], True):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": value}))
        with pytest.raises(SpecError, match=r"config.json: eos_token_id: expected an integer or a list of them"):
            Engine(tmp_path, config())  # a folder without weights


def test_no_model_and_no_device_are_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"model.path: expected a Hugging Face folder"):
        Engine(config=config())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model.device: .*cuda"):
        Engine(folder, config(model={"device": "cuda"}))
    with pytest.raises(ConfigError, match=r"model.device"):
        Engine(folder, config(model={"device": "tpu"}))
    with pytest.raises(ConfigError, match=r"model.dtype"):
        Engine(folder, config(model={"dtype": "int8"}))


def test_missing_and_truncated_checkpoints_are_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .*nowhere"):
        Engine(tmp_path / "nowhere", config())
    cut = tmp_path / "cut"
    cut.mkdir()
    for file in folder.iterdir():
        (cut / file.name).write_bytes(file.read_bytes())
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) - 100])
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        Engine(cut, config())
