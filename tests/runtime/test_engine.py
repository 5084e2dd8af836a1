"""The engine's behaviour: streaming, stop conditions, bad input, failures, statistics."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtime.answer import Completion, Event
from runtime.config import ConfigError
from runtime.engine import Engine
from runtime.model import CheckpointError
from runtime.request import RequestError, SamplingParams
from runtime.rotary import SpecError
from runtime.text import Tokenizer
from tests.runtime.test_text import TEMPLATE, byte_tokenizer
from tests.runtime.tiny import CONFIG, prompt_of, tiny_model


def config(**sections: Any) -> dict[str, Any]:
    """Eager, so that an engine starts in milliseconds; the modes have their own tests."""
    sections.setdefault("graph", {"mode": "eager", "capture_sizes": []})
    sections.setdefault("cache", {"num_pages": 33, "page_size": 8})
    sections.setdefault("scheduler", {"max_num_seqs": 4, "max_batch_tokens": 32})
    return {"compile": {"backend": "eager"}, **sections}


def make_engine(device: torch.device, text: bool = False, **sections: Any) -> Engine:
    return Engine(tiny_model(device), config(**sections), tokenizer=Tokenizer(byte_tokenizer(), TEMPLATE) if text else None)


def check_idle(engine: Engine) -> None:
    """Nothing is held, and the engine still answers."""
    assert not engine.has_work
    engine.scheduler.blocks.check([])
    (answer,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert len(answer.token_ids) == 3


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


# -- answers ---------------------------------------------------------------------------------------------------------------------


def test_a_request_alone_and_in_a_batch_gets_the_same_tokens(device: torch.device) -> None:
    engine = make_engine(device)
    prompts = [prompt_of(n, seed=1) for n in (1, 3, 8, 9, 30)]
    params = [SamplingParams(max_tokens=6 + i) for i in range(5)]
    together = engine.generate(prompts, params)
    assert [len(answer.token_ids) for answer in together] == [6, 7, 8, 9, 10]
    for prompt, each, answer in zip(prompts, params, together, strict=True):
        assert engine.generate([prompt], each) == [answer]
        assert answer.prompt_token_ids == prompt
    check_idle(engine)


def test_one_prompt_need_not_be_in_a_list(device: torch.device) -> None:
    engine = make_engine(device, text=True)
    params = SamplingParams(max_tokens=4)
    assert engine.generate("ab", params) == engine.generate(["ab"], params)
    assert engine.generate([1, 2], params) == engine.generate([[1, 2]], params)
    assert engine.generate([]) == []
    same = engine.generate([[1, 2], [3, 4]], params)
    assert engine.generate(np.array([[1, 2], [3, 4]]), params) == same
    assert engine.generate(torch.tensor([[1, 2], [3, 4]]), params) == same
    assert engine.generate(np.array([1, 2]), params) == engine.generate(torch.tensor([1, 2]), params) == same[:1]
    assert engine.generate((prompt for prompt in ([1, 2], [3, 4])), params) == same


def test_streamed_events_add_up_to_the_completion(device: torch.device) -> None:
    engine = make_engine(device, text=True)
    prompts, params = ["a", "héllo 😀", "xyz"], SamplingParams(max_tokens=20)
    completions = engine.generate(prompts, params)
    events = list(engine.stream(prompts, params))
    for index, completion in enumerate(completions):
        mine = [event for event in events if event.index == index]
        assert "".join(event.text for event in mine) == completion.text
        assert [token for event in mine for token in event.token_ids] == completion.token_ids
        assert [event.finish_reason for event in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]
        assert completion.text == engine.tokenizer.decode(completion.token_ids)
    assert [event.index for event in events][:3] == [0, 1, 2], "the answers grow together"


@pytest.mark.parametrize("more", [{}, {"stop": ("q",)}, {"logprobs": 2}])
def test_a_whole_answer_is_one_event(device: torch.device, more: dict[str, Any]) -> None:
    engine = make_engine(device, text=True)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, **more)
    (expected,) = engine.generate("ab", params)
    answer = engine.submit("ab", params, whole=True)
    while not answer.finished:
        assert not answer.events
        engine.step()
    assert list(answer.events) == [Event(0, expected.text, expected.token_ids, expected.finish_reason, None, expected.logprobs)]
    streamed = list(engine.stream("ab", params))
    assert "".join(event.text for event in streamed) == expected.text and len(streamed) == len(expected.token_ids)
    gone = engine.submit("ab", params, whole=True)
    for _ in range(3):
        engine.step()
    engine.abort(gone)
    (event,) = gone.events
    assert (
        event.finish_reason == "abort"
        and event.token_ids == gone.request.generated
        and event.text == engine.tokenizer.decode(event.token_ids)
    )
    while engine.has_work:
        engine.step()
    check_idle(engine)


def test_two_streams_may_run_interleaved(device: torch.device) -> None:
    engine = make_engine(device)
    params = SamplingParams(max_tokens=5)
    first, second = engine.stream([[1, 2]], params), engine.stream([[3]], params)
    pairs = list(zip(first, second, strict=True))
    assert [a.token_ids[0] for a, _ in pairs] == engine.generate([[1, 2]], params)[0].token_ids
    assert [b.token_ids[0] for _, b in pairs] == engine.generate([[3]], params)[0].token_ids


def test_leaving_a_stream_ends_its_requests(device: torch.device) -> None:
    engine = make_engine(device)
    stream = engine.stream([[1, 2], [3]], SamplingParams(max_tokens=50))
    next(stream)
    stream.close()
    while engine.has_work:  # a step may still be in flight
        engine.step()
    check_idle(engine)


def test_a_stream_that_is_never_read_ends_its_requests(device: torch.device) -> None:
    engine = make_engine(device)
    stream = engine.stream([[1, 2], [3]], SamplingParams(max_tokens=50))
    assert engine.has_work
    del stream
    check_idle(engine)


def test_aborting_one_request_leaves_the_others(device: torch.device) -> None:
    engine = make_engine(device)
    params = SamplingParams(max_tokens=8)
    alone = engine.generate([[5, 6]], params)[0]
    gone, kept = engine.submit([1, 2, 3], params), engine.submit([5, 6], params)
    engine.step()
    engine.abort(gone)
    engine.abort(gone)
    while not kept.finished:
        engine.step()
    assert kept.completion() == alone
    assert gone.completion().finish_reason == "abort"
    while engine.has_work:
        engine.step()
    check_idle(engine)


@pytest.mark.parametrize("overlap", [True, False])
def test_stop_string_ends_the_answer_before_it(device: torch.device, overlap: bool) -> None:
    engine = make_engine(device, text=True, scheduler={"max_num_seqs": 4, "max_batch_tokens": 32, "overlap": overlap})
    full = engine.generate(["ab"], SamplingParams(max_tokens=30))[0]
    # from inside the answer, and not only bytes that are no text
    stop = next(piece for piece in (full.text[i : i + 3] for i in range(6, len(full.text) - 3)) if piece.strip("\ufffd"))
    cut = engine.generate(["ab"], SamplingParams(max_tokens=30, stop=stop))[0]
    assert cut.finish_reason == "stop"
    assert cut.text == full.text[: full.text.index(stop)]
    assert full.token_ids[: len(cut.token_ids)] == cut.token_ids, "not one token more than it took to see the stop string"
    assert stop in engine.tokenizer.decode(cut.token_ids) and stop not in engine.tokenizer.decode(cut.token_ids[:-1])
    check_idle(engine)


def test_end_of_sequence_stops_unless_ignored(device: torch.device, folder: Path) -> None:
    plain = make_engine(device).generate([[1]], SamplingParams(max_tokens=40))[0].token_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [plain[20], 256]}))
    engine = Engine(folder, config(model={"device": device.type, "dtype": "float32"}))
    first = plain.index(plain[20])
    answer = engine.generate([[1]], SamplingParams(max_tokens=40))[0]
    assert (answer.token_ids, answer.finish_reason) == (plain[: first + 1], "stop")
    answer = engine.generate([[1]], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    assert (answer.token_ids, answer.finish_reason) == (plain, "length")


def test_seeds_make_draws_repeatable_and_independent_of_the_batch(device: torch.device) -> None:
    engine = make_engine(device)
    hot = SamplingParams(temperature=2.0, max_tokens=20, seed=11)
    alone = engine.generate([[1, 2]], hot)[0].token_ids
    others = [SamplingParams(temperature=1.5, top_k=5, top_p=0.9, max_tokens=9, seed=i) for i in range(3)]
    batch = engine.generate([[3], [1, 2], [4], [5]], [others[0], hot, others[1], others[2]])
    assert batch[1].token_ids == alone
    assert engine.generate([[1, 2]], SamplingParams(temperature=2.0, max_tokens=20, seed=12))[0].token_ids != alone
    unseeded = SamplingParams(temperature=2.0, max_tokens=20)
    twice = engine.generate([[1, 2], [1, 2]], unseeded)
    assert twice[0].token_ids != twice[1].token_ids, "requests without a seed do not all draw the same"


def test_a_prefix_in_the_cache_changes_no_token(device: torch.device) -> None:
    for length in (7, 8, 9, 16, 17):
        engine = make_engine(device)
        params = SamplingParams(max_tokens=6)
        first = engine.generate([prompt_of(length)], params)
        assert engine.stats()["cached_tokens"] == first[0].cached_tokens == 0
        again = engine.generate([prompt_of(length)], params)
        assert again == first
        assert engine.stats()["cached_tokens"] == again[0].cached_tokens == (length - 1) // 8 * 8


def test_changed_weights_need_another_prefix_cache(device: torch.device) -> None:
    engine, params = make_engine(device), SamplingParams(max_tokens=4)
    first = engine.generate([prompt_of(20)], params)
    with torch.no_grad():
        engine.model.embed_tokens.copy_(engine.model.embed_tokens.roll(7, 0))
    engine.reset_prefix_cache()
    changed = engine.generate([prompt_of(20)], params)
    assert engine.stats()["cached_tokens"] == 0 and changed != first
    engine.submit([1], params)
    with pytest.raises(RuntimeError, match="reset_prefix_cache: requests are under way"):
        engine.reset_prefix_cache()


def test_chat_uses_the_template(device: torch.device) -> None:
    engine = make_engine(device, text=True)
    answer = engine.generate(["hi"], SamplingParams(max_tokens=2), chat=True)[0]
    assert engine.tokenizer.decode(answer.prompt_token_ids) == "[user]hi[assistant]"


# -- bad input -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1, 320], r"prompt\[1\]: expected a token id from 0 to 319, got 320"),
        ([-1], r"prompt\[0\]: expected a token id from 0 to 319, got -1"),
        ([1, "a"], r"prompt\[1\]: expected a token id, got 'a'"),
        ([1.5], r"prompt\[0\]: expected a token id, got 1.5"),
        ([True], r"prompt\[0\]: expected a token id, got True"),
        ("a\ud800", "the text is not valid Unicode: surrogates not allowed at position 1"),
        (None, "expected a text or token ids, got None"),
        (torch.tensor(1.5), r"expected a text or token ids, got tensor\(1.5"),
        ({"prompt": "a"}, r"expected a text or token ids, got \{'prompt': 'a'\}"),
        (list(range(300)), r"300 tokens and needs 38 pages of 8; the cache has 32 \(cache.num_pages = 33"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_alone(device: torch.device, prompt: Any, message: str) -> None:
    engine = make_engine(device, text=True)
    params = SamplingParams(max_tokens=3)
    good = engine.generate([[1, 2]], params)[0]
    with pytest.raises(RequestError, match=f"prompt 1: .*{message}"):
        engine.generate([[1, 2], prompt], params)
    check_idle(engine)
    refused, served = engine.generate([prompt, [1, 2]], params, on_error="return")
    assert served == good
    assert refused.finish_reason == "error" and refused.token_ids == [] and "prompt 0: " in str(refused.error)
    events = list(engine.stream([prompt, [1, 2]], params, on_error="return"))
    assert events[0] == Event(0, "", [], "error", refused.error)
    check_idle(engine)


def test_text_without_a_tokenizer_is_refused(device: torch.device) -> None:
    engine = make_engine(device)
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.generate(["hi"])
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        engine.generate([[1]], SamplingParams(stop="x"))
    check_idle(engine)


@pytest.mark.parametrize("prompts", [None, 5, np.int64(5), torch.tensor(5), {"prompt": "a"}])
def test_prompts_that_are_none_are_named(device: torch.device, prompts: Any) -> None:
    engine = make_engine(device)
    for method in (engine.generate, engine.stream):
        with pytest.raises(TypeError, match=r"prompts: expected a text, token ids, or several of either, got"):
            method(prompts)
    check_idle(engine)


def test_params_must_match_the_prompts(device: torch.device) -> None:
    engine = make_engine(device)
    with pytest.raises(ValueError, match=r"params: expected one SamplingParams or one per prompt \(2\), got 1"):
        engine.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(TypeError, match=r"params: expected SamplingParams or a list of them, one per prompt, got \{'max_tokens': 2\}"):
        engine.generate([[1]], {"max_tokens": 2})


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


def test_chunks_run_eager_where_no_graph_is_large_enough_for_them(device: torch.device) -> None:
    engine = make_engine(device, graph={"max_tokens": 1}, scheduler={"max_num_seqs": 2, "max_batch_tokens": 16})
    prompts, params = [[1, 2, 3], [4, 5]], SamplingParams(max_tokens=3)
    assert engine.generate(prompts, params) == make_engine(device).generate(prompts, params)
    assert engine.runner.rows_by_kind()["mixed"] == []
    assert engine.explain(1, 5).mode == "eager"


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


def test_autocast_of_the_caller_changes_no_token(device: torch.device) -> None:
    engine = make_engine(device)
    expected = engine.generate([prompt_of(20)], SamplingParams(max_tokens=6))
    with torch.autocast(device.type, torch.bfloat16):
        again = make_engine(device).generate([prompt_of(20)], SamplingParams(max_tokens=6))
        assert engine.generate([prompt_of(20)], SamplingParams(max_tokens=6)) == again == expected
    check_idle(engine)


def test_the_step_that_sizes_the_cache_runs_without_autocast(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU an engine tries its largest step out before anything is captured, wherever it is made."""
    runner, seen = make_engine(device).runner, list[bool]()
    for name in ("empty_cache", "reset_peak_memory_stats", "memory_allocated", "synchronize", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 30))
    monkeypatch.setattr(runner, "module", lambda **_: seen.append(torch.is_autocast_enabled(device.type)))
    with torch.autocast(device.type, torch.bfloat16):
        runner._free_after_largest_step(64)
    assert seen == [False]


def test_a_call_of_another_thread_meanwhile_is_refused(device: torch.device) -> None:
    """It would work on what the other one is just changing, and give wrong tokens. One after the other they may call."""
    engine, errors = make_engine(device), list[str]()

    def other() -> None:
        for call in (engine.step, lambda: engine.submit([1])):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))

    def in_a_thread() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    def mask(generated: list[int]) -> None:  # called inside of a step
        if not generated:
            in_a_thread()

    answer = engine.submit([1, 2], SamplingParams(max_tokens=2), mask=mask)
    while not answer.finished:
        engine.step()
    assert len(errors) == 2 and all("another thread is in a call of this engine" in error for error in errors)
    in_a_thread()
    assert len(errors) == 2
    while engine.has_work:
        engine.step()
    check_idle(engine)


def test_generate_keeps_its_turn_between_steps(device: torch.device) -> None:
    """Else the other thread's step could come between two of its own, and it would be the one that is refused."""
    engine, errors = make_engine(device), list[str]()
    expected = engine.generate([[1, 2]], SamplingParams(max_tokens=3))
    step = engine.step

    def other() -> None:
        try:
            engine.submit([3])
        except RuntimeError as error:
            errors.append(str(error))

    def step_and_meet() -> None:
        step()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    engine.step = step_and_meet  # type: ignore[method-assign]
    assert engine.generate([[1, 2]], SamplingParams(max_tokens=3)) == expected
    assert errors and all("another thread is in a call of this engine" in error for error in errors)
    engine.step = lambda: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        engine.generate([[1, 2]])
    errors.clear()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert not errors, "a call that failed has ended its turn"


def test_who_aborts_in_another_thread_refuses_nobody(device: torch.device) -> None:
    """Streams end their requests wherever they are collected: the thread that serves waits for that and goes on."""
    engine = make_engine(device)
    kept, dropped = (engine.submit([i], SamplingParams(max_tokens=3)) for i in (1, 2))
    finish, entered, go_on = engine.scheduler.finish, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        entered.set()
        assert go_on.wait(30)
        finish(*arguments)

    engine.scheduler.finish = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=engine.abort, args=(dropped,))
    thread.start()
    assert entered.wait(30)
    threading.Timer(0.05, go_on.set).start()
    engine.step()
    thread.join()
    assert dropped.completion().finish_reason == "abort"
    while not kept.finished:
        engine.step()
    assert kept.completion().finish_reason == "length"
    check_idle(engine)


def test_what_is_of_another_engine_or_kind_is_named(device: torch.device) -> None:
    engine, other = make_engine(device), make_engine(device)
    kept, foreign = engine.submit([1], SamplingParams(max_tokens=2)), other.submit([1])
    with pytest.raises(ValueError, match="answer: it was not submitted to this engine"):
        engine.abort(foreign)
    with pytest.raises(TypeError, match="salt: expected bytes, got 'tenant'"):
        engine.submit([1], salt="tenant")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"batch: expected 1 to 4 requests .* got 3 that decode and -2 prompt tokens"):
        engine.explain(3, -2)
    while not kept.finished:
        engine.step()
    assert kept.completion().finish_reason == "length"
    check_idle(engine)


# -- failures --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["launch", "read"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_fails_leaves_the_engine_usable(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, where: str, overlap: bool
) -> None:
    engine = make_engine(device, scheduler={"max_num_seqs": 2, "max_batch_tokens": 32, "overlap": overlap})
    good = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    calls = 0
    real = getattr(engine.runner, where)

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the device is on fire")
        return real(*arguments)

    monkeypatch.setattr(engine.runner, where, failing)
    running = [engine.submit(prompt_of(9), SamplingParams(max_tokens=30)) for _ in range(2)]
    waiting = engine.submit([1, 2, 3], SamplingParams(max_tokens=4))
    with pytest.raises(RuntimeError, match="on fire"):
        while not waiting.finished:
            engine.step()
    assert [answer.completion().finish_reason for answer in running] == ["error", "error"]
    while not waiting.finished:
        engine.step()
    assert waiting.completion() == good[0]
    check_idle(engine)


def test_a_model_taken_over_by_another_engine_is_noticed(device: torch.device) -> None:
    model = tiny_model(device)
    first = Engine(model, config())
    second = Engine(model, config())
    with pytest.raises(RuntimeError, match="another engine"):
        first.generate([[1]], SamplingParams(max_tokens=2))
    assert len(second.generate([[1]], SamplingParams(max_tokens=2))[0].token_ids) == 2


def test_statistics_count_tokens_and_modes(device: torch.device) -> None:
    engine = make_engine(device, graph={"mode": "full", "capture_sizes": [1, 2, 4], "max_tokens": 8})
    engine.generate([prompt_of(20), prompt_of(3)], SamplingParams(max_tokens=5))
    stats = engine.stats()
    assert stats["prompt_tokens"] == 23 and stats["generated_tokens"] == 10
    steps = stats["modes"]["steps"]
    assert sum(steps["full"].values()) >= 4 and sum(sum(by_size.values()) for by_size in steps.values()) == stats["steps"]


def test_completions_are_plain_data() -> None:
    assert Completion("a", [1], "stop", [2]) == Completion("a", [1], "stop", [2])
