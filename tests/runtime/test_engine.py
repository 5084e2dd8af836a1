"""The engine's behaviour: streaming, stop conditions, bad input, threads, failures, statistics."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from runtime.answer import Completion, Event
from runtime.engine import Engine
from runtime.request import RequestError, SamplingParams
from tests.runtime.engine_rig import check_idle, config, make_engine
from tests.runtime.tiny import prompt_of, tiny_model

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


def test_chunks_run_eager_where_no_graph_is_large_enough_for_them(device: torch.device) -> None:
    engine = make_engine(device, graph={"max_tokens": 1}, scheduler={"max_num_seqs": 2, "max_batch_tokens": 16})
    prompts, params = [[1, 2, 3], [4, 5]], SamplingParams(max_tokens=3)
    assert engine.generate(prompts, params) == make_engine(device).generate(prompts, params)
    assert engine.runner.rows_by_kind()["mixed"] == []
    assert engine.explain(1, 5).mode == "eager"


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
