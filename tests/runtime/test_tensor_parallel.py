"""Tensor parallelism: whole engines on 2 ranks (two torchrun agents, as on two hosts) and on 4 answer like one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.cli import main
from runtime.config import ConfigError, RuntimeConfig
from runtime.model import random_model
from runtime.parallel import TensorParallel, join
from runtime.spec import ModelSpec
from tests.runtime.checkpoints import write_folder
from tests.runtime.tensor_parallel_ranks import BASE, MODELS, answers
from tests.runtime.test_text import byte_tokenizer

HERE = Path(__file__).parent
GPU = torch.cuda.is_available()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(commands: list[list[str]], environments: list[dict[str, str]]) -> list[str]:
    """What each printed to stdout; all must end well."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    processes = [
        subprocess.Popen(command, env={**common, **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command, own in zip(commands, environments, strict=True)
    ]
    try:
        outs = [process.communicate(timeout=240) for process in processes]
        for process, (out, err) in zip(processes, outs, strict=True):
            assert process.returncode == 0, (out + err)[-3000:]
        return [out for out, _ in outs]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_agents_generate_what_one_process_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line from a checkpoint in shards, graphs measured and picked, each rank under its own agent as on two hosts."""
    shape = {**BASE, "eos_token_id": None}
    folder = write_folder(tmp_path / "model", random_model(shape, 3, "float32", "cpu"), {**shape, "tie_word_embeddings": True}, shards=2)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    command = ["generate", "--model.path", str(folder), "--model.dtype", "float32", "--max-tokens", "16", "--quiet"]
    command += ["--compile.backend", "eager", "--graph.capture_sizes", "[1, 2]", "--graph.max_tokens", "4", "--cache.num_pages", "40"]
    command += ["--scheduler.max_num_seqs", "4", "--scheduler.max_batch_tokens", "32", "first", "and a second one"]
    assert main(command) == 0
    alone = capsys.readouterr().out
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    agent += ["--master-port", str(_free_port())]
    visible = [{"CUDA_VISIBLE_DEVICES": str(index)} if GPU else {} for index in range(2)]
    outs = _run([[*agent, "--node-rank", str(node), "-m", "runtime", *command, "--parallel.tensor", "2"] for node in range(2)], visible)
    assert alone and outs == [alone, ""], "rank 0 prints what one process prints, the other nothing"


@pytest.mark.skipif(GPU and torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_four_ranks_with_fewer_kv_heads_answer_like_one(tmp_path: Path) -> None:
    script = [sys.executable, str(HERE / "tensor_parallel_ranks.py"), str(tmp_path / "{rank}.json")]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "4"}
    _run([script] * 4, [{**address, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(4)])
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for name in MODELS:
        assert found[0][name][0] == answers(name, "eager", 1)[0], name
    assert found[0]["tied, KV heads split"][1]["full"], found[0]
    assert all(each == found[0] for each in found[1:]), "the ranks went different ways"


@pytest.mark.parametrize("world", [2, 4])
def test_the_parts_of_all_ranks_make_the_whole_model(world: int) -> None:
    """Every weight is held by some rank, at its place; biases of row-parallel projections once."""
    config = {**BASE, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "vocab_size": 321, "tie_word_embeddings": False}
    whole = random_model(config, 1, "float32", "cpu").hf_state_dict()
    parts = [random_model(config, 1, "float32", "cpu", TensorParallel("none", rank, world)).hf_state_dict() for rank in range(world)]
    for name, full in whole.items():
        mine = [part[name] for part in parts]
        module, kind = name.split(".")[-2:]
        if module in ("o_proj", "down_proj"):
            joined = torch.cat(mine, 1) if kind == "weight" else sum(mine)
        elif module in ("k_proj", "v_proj"):
            joined = torch.cat(mine[:: max(1, world // 2)])  # two KV heads: at four ranks every second one repeats
        elif "norm" in module:
            joined = mine[-1]
        else:
            joined = torch.cat(mine)[: len(full)]
        assert torch.equal(joined, full), name


def test_sizes_that_cannot_be_shared_out_are_named() -> None:
    for change, world, words in (
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "num_attention_heads"),
        ({"intermediate_size": 90}, 4, "intermediate_size"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "num_key_value_heads"),
    ):
        with pytest.raises(ConfigError, match=f"parallel.tensor: .*{words}.*got {world}"):
            TensorParallel("none", 0, world).local_spec(ModelSpec.from_config({**BASE, **change}))


def test_b125_a_wrong_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"parallel.tensor: 2 ranks are configured and 1 is running; start with: torchrun"):
        join(RuntimeConfig.load({"parallel": {"tensor": 2}}))
