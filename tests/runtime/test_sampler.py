"""Penalties, bias, masks, min-p, log-probabilities and several answers, through the engine, against a plain loop over transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import tkernels
from runtime.engine import Engine
from runtime.request import RequestError, SamplingParams
from runtime.sampler import pack_mask
from tests.runtime.engine_rig import check_idle, config, make_engine
from tests.runtime.tiny import prompt_of, tiny_model, twin
from tkernels.sampling import sample_ref

VOCAB = 320
Hook = Callable[[Sequence[int]], Any]


@cache
def _twin(device: str) -> Any:
    return twin(tiny_model(torch.device(device)))


def words_of(allowed: Sequence[int]) -> np.ndarray:
    """The packed mask, bit by bit."""
    words = [sum(1 << (token % 32) for token in set(allowed) if token // 32 == word) for word in range(VOCAB // 32)]
    return np.array(words, np.uint32).view(np.int32)


@torch.no_grad()
def reference(device: torch.device, prompt: list[int], params: SamplingParams, seed: int, mask: Hook | None = None) -> tuple[Any, Any]:
    """(tokens, (logprob, top) of each), from full forward passes and dictionaries."""
    hf, tokens, logprobs = _twin(device.type), list(prompt), []
    for step in range(params.max_tokens):
        logits = hf(torch.tensor([tokens], device=device)).logits[0, -1].double().cpu()
        plain = logits.log_softmax(-1)
        said = Counter(tokens[len(prompt) :])
        for token in {*prompt, *said}:
            logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
        for token, count in said.items():
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        allowed = set(range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids)
        if mask is not None and (words := mask(tokens[len(prompt) :])) is not None:
            allowed &= {token for token in range(VOCAB) if np.asarray(words).reshape(-1).view(np.uint32)[token // 32] >> (token % 32) & 1}
        logits[[token for token in range(VOCAB) if token not in allowed]] = -float("inf")
        one = lambda value, dtype: torch.tensor([value], dtype=dtype)
        token = int(
            sample_ref(
                logits[None], one(params.temperature, torch.float32), one(params.top_k, torch.int32), one(params.top_p, torch.float32),
                one(seed, torch.int64), one(step, torch.int64), one(params.min_p, torch.float32),
            )
        )  # fmt: skip
        tokens.append(token)
        logprobs.append((float(plain[token]), plain.topk(params.logprobs or 0)))
        if token in params.stop_token_ids:
            break
    return tokens[len(prompt) :], logprobs


PARAMS = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.5, "temperature": 0.8, "seed": 3},
    {"logit_bias": {5: 4.0, 300: 5.0, 7: -3.0}, "repetition_penalty": 0.8},
    {"allowed_token_ids": (3, 31, 32, 200, 319), "temperature": 2.0, "seed": 1},
    {"min_p": 0.2, "temperature": 1.5, "seed": 9},
    {"min_p": 0.02, "top_k": 30, "top_p": 0.9, "temperature": 1.2, "presence_penalty": 0.5, "logit_bias": {9: 2.0}, "seed": 4},
    {},
    {"temperature": 1.0, "seed": 8},
]


@pytest.mark.parametrize(("overlap", "pages"), [(True, 33), (False, 33), (True, 8)])
def test_each_parameter_equals_the_reference_in_any_company(device: torch.device, overlap: bool, pages: int) -> None:
    """All of them side by side, four at a time, a full chunk or a page short, preempted where pages are scarce."""
    limits = {"max_num_seqs": 4, "max_batch_tokens": 11, "overlap": overlap, "policy": "static"}  # the other one would not preempt
    engine = make_engine(device, cache={"num_pages": pages, "page_size": 8}, scheduler=limits)
    params = [SamplingParams(max_tokens=14, logprobs=index % 3 if index % 2 else None, **each) for index, each in enumerate(PARAMS)]
    prompts = [prompt_of(5 + 3 * index) for index in range(len(params))]
    for prompt, each, answer in zip(prompts, params, engine.generate(prompts, params), strict=True):
        tokens, logprobs = reference(device, prompt, each, each.seed or 0)
        assert answer.token_ids == tokens
        assert (answer.logprobs is None) == (each.logprobs is None)
        for got, (own, top) in zip(answer.logprobs or (), logprobs, strict=False):
            assert got.logprob == pytest.approx(own, abs=1e-4)
            assert list(got.top) == top.indices.tolist()
            assert list(got.top.values()) == pytest.approx(top.values.tolist(), abs=1e-4)
        assert answer.logprobs is None or len(answer.logprobs) == len(tokens)
    if pages == 8:
        assert engine.scheduler.preemptions > 0, "the test needs requests whose state is made anew"
    check_idle(engine)


@pytest.mark.interpreted
def test_the_kernels_themselves_equal_the_reference(device: torch.device) -> None:
    """The other tests of this file run the ops' references on a CPU."""
    params = [SamplingParams(max_tokens=3, logprobs=2, **PARAMS[index]) for index in (1, 3, 4, 6)]
    prompts = [prompt_of(2 + index) for index in range(len(params))]
    for prompt, each, answer in zip(prompts, params, make_engine(device).generate(prompts, params), strict=True):
        tokens, logprobs = reference(device, prompt, each, each.seed or 0)
        assert answer.token_ids == tokens
        assert [list(got.top) for got in answer.logprobs or ()] == [top.indices.tolist() for _, top in logprobs]


def test_plain_rows_draw_the_same_beside_others(device: torch.device) -> None:
    """In graphs too: what other requests ask changes no bit of a plain one, and a slot's state does not outlive its request."""
    graphs = {"mode": "full", "capture_sizes": [1, 2, 4], "max_tokens": 8, "on_capture_error": "raise"}
    plain = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=1.3, top_p=0.9, seed=5)]
    others = [SamplingParams(max_tokens=12, **PARAMS[3]), SamplingParams(max_tokens=12, **PARAMS[4])]
    engine = Engine(tiny_model(device), config(graph=graphs))
    prompts = [prompt_of(length) for length in (3, 5, 7, 4)]
    alone = engine.generate(prompts[:2], plain)
    together = engine.generate(prompts, [*plain, *others])
    assert together[:2] == alone
    assert together[2].token_ids == reference(device, prompts[2], others[0], 0)[0]
    assert engine.generate(prompts[:2], plain) == alone
    assert sum(engine.stats()["modes"]["steps"]["full"].values()) > 30, "the steps were captured ones"


def _ask_for_everything(engine: Engine) -> None:
    """Every parameter alone and all side by side, with masks, short and long prompts."""
    params = [SamplingParams(max_tokens=4, logprobs=index % 4, **each) for index, each in enumerate(PARAMS)]
    many = SamplingParams(max_tokens=3, logit_bias=dict.fromkeys(range(40), 1.0), presence_penalty=1.0)
    for prompt in (prompt_of(3), prompt_of(40)):
        for each in [*params, many]:
            engine.generate([prompt], each)
        engine.generate([prompt] * len(params), params)
        for each in (SamplingParams(max_tokens=3), many):
            answer = engine.submit(prompt, each, mask=lambda tokens: words_of([1, 5, 60]))
            while not answer.finished:
                engine.step()


def test_the_warm_up_has_every_kernel_that_requests_ask_for(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells one compiled kernel from another: which state there is, and how wide the blocks are."""
    block = lambda n: min(256, max(32, 1 << (n - 1).bit_length()))
    seen: set[Any] = set()
    for name, variant in {
        "adjust_logits": lambda logits, **k: (logits.dtype, logits.stride(0), *sorted(k), k["bias_ids"].shape[1] if "bias_ids" in k else 0),
        "count_tokens": lambda counts, slots, tokens, prompt=False: (block(len(tokens)), prompt) if len(tokens) else None,
        "top_logprobs": lambda logits, tokens, n: n,
        "sample": lambda logits, *_, min_p=None: (logits.dtype, min_p is None),
    }.items():
        op = getattr(tkernels, name)

        def noting(*args: Any, name: str = name, op: Any = op, variant: Any = variant, **kwargs: Any) -> Any:
            seen.add((name, variant(*args, **kwargs)))
            return op(*args, **kwargs)

        monkeypatch.setattr(tkernels, name, noting)
    engine = make_engine(device)
    engine.runner.sampler.warm_up(torch.float32)
    warm = seen | {("count_tokens", None), ("sample", (torch.float32, True))}  # nothing to count; the plain draw of every step
    assert engine.runner.sampler._counts is None, "the state of all slots is made when it is needed"
    seen.clear()
    _ask_for_everything(engine)
    assert len(seen) > 12 and seen <= warm


@pytest.mark.gpu
def test_b066_no_request_compiles_anything_after_the_start(device: torch.device) -> None:
    import triton.knobs

    engine = make_engine(device)
    engine.generate([prompt_of(3), prompt_of(40)], SamplingParams(max_tokens=3))  # the model's own kernels
    compiled: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **each: compiled.append(str(each["repr"]))
    try:
        _ask_for_everything(engine)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled


def test_logprobs_come_with_the_stream(device: torch.device) -> None:
    engine = make_engine(device)
    params = SamplingParams(max_tokens=5, logprobs=2)
    (whole,) = engine.generate([[1, 2]], params)
    events = list(engine.stream([[1, 2]], params))
    assert [lp for event in events for lp in event.logprobs or ()] == whole.logprobs
    assert all(max(lp.top.values()) == lp.logprob for lp in whole.logprobs or ()), "greedy takes the likeliest"


def test_stop_token_ids_end_an_answer_also_when_the_end_token_is_ignored(device: torch.device) -> None:
    engine = make_engine(device)
    full = engine.generate([[1]], SamplingParams(max_tokens=30))[0].token_ids
    stop = full[12]
    for ignore in (False, True):
        (cut,) = engine.generate([[1]], SamplingParams(max_tokens=30, stop_token_ids=(stop, 1), ignore_eos=ignore))
        first = min(full.index(token) for token in (stop, 1) if token in full)
        assert (cut.token_ids, cut.finish_reason) == (full[: first + 1], "stop")


# -- masks -----------------------------------------------------------------------------------------------------------------------


def even_then_odd(generated: Sequence[int]) -> Any:
    """Depends on the token before, as a grammar does; every third token is free. As xgrammar gives it: a tensor with a row."""
    if len(generated) % 3 == 2:
        return None
    parity = 0 if not generated else 1 - generated[-1] % 2
    return torch.from_numpy(words_of([token for token in range(VOCAB) if token % 2 == parity]))[None]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_mask_sees_every_token_before_the_next(device: torch.device, overlap: bool) -> None:
    engine = make_engine(device, scheduler={"max_num_seqs": 4, "max_batch_tokens": 11, "overlap": overlap})
    params = SamplingParams(max_tokens=12, allowed_token_ids=tuple(range(10, 300)))
    plain = engine.generate([prompt_of(4)], SamplingParams(max_tokens=20))[0]
    masked = [engine.submit(prompt_of(length), params, mask=even_then_odd) for length in (6, 20)]
    beside = engine.submit(prompt_of(4), SamplingParams(max_tokens=20))
    while engine.has_work:
        engine.step()
    for length, answer in zip((6, 20), masked, strict=True):
        assert answer.completion().token_ids == reference(device, prompt_of(length), params, 0, even_then_odd)[0]
    assert beside.completion() == plain
    check_idle(engine)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda generated: words_of([5]) if len(generated) < 2 else words_of([]), "mask: it allows no token at all"),
        (lambda generated: np.zeros(3, np.int32), "mask: expected 10 packed int32 words for a vocabulary of 320, got 3 of int32"),
        (lambda generated: [1.5] * 10, "got 10 of float64"),
        (lambda generated: {}[generated[0]], "mask: IndexError"),
    ],
)
def test_a_mask_that_fails_ends_its_own_request(device: torch.device, mask: Hook, message: str) -> None:
    engine = make_engine(device)
    params = SamplingParams(max_tokens=8)
    good = engine.generate([[5, 6]], params)[0]
    bad, beside = engine.submit([1, 2, 3], params, mask=mask), engine.submit([5, 6], params)
    while engine.has_work:
        engine.step()
    assert bad.completion().finish_reason == "error" and message in str(bad.completion().error)
    assert bad.events[-1].error == bad.completion().error
    assert beside.completion() == good
    check_idle(engine)


def test_a_mask_and_allowed_token_ids_without_a_common_token_end_the_request(device: torch.device) -> None:
    engine = make_engine(device)
    params = SamplingParams(max_tokens=3, allowed_token_ids=(1, 2))
    apart = engine.submit([5], params, mask=lambda generated: words_of([3, 4]))
    meeting = engine.submit([5], params, mask=lambda generated: words_of([2, 3]))
    while engine.has_work:
        engine.step()
    assert apart.completion().error == "mask: it allows no token that allowed_token_ids has"
    assert meeting.completion().token_ids == [2, 2, 2]


def test_bits_past_the_vocabulary_allow_nothing() -> None:
    words = np.array([0, 0x7FFFFFF0], np.int32)
    with pytest.raises(ValueError, match="no token at all"):
        pack_mask(words, 36)
    assert pack_mask(words, 37) is not None
    assert pack_mask(None, 36) is None


# -- several answers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [1, 8, 9, 30])
def test_n_answers_share_the_pages_of_their_prompt(device: torch.device, length: int, prefix_cache: bool) -> None:
    """Each equals the answer of its own seed alone; the prompt's full pages are computed and held once."""
    engine = make_engine(device, cache={"num_pages": 60, "page_size": 8, "prefix_cache": prefix_cache})
    params = SamplingParams(n=3, max_tokens=9, temperature=1.5, seed=7)
    answers = engine.submit_samples(prompt_of(length), params)
    most = 0
    while engine.has_work:
        engine.step()
        held = [page for answer in answers for page in answer.request.pages]
        most = max(most, len(held) - len(set(held)))
    shared = (length - 1) // 8
    assert most == 2 * shared
    assert engine.stats()["cached_tokens"] == 2 * shared * 8
    completions = [answer.completion() for answer in answers]
    assert len({tuple(each.token_ids) for each in completions}) == 3, "each draws its own numbers"
    for answer, each in zip(answers, completions, strict=True):
        assert each.token_ids == reference(device, prompt_of(length), params, answer.request.seed)[0]
    assert completions[0].token_ids == engine.generate([prompt_of(length)], params.model_copy(update={"n": 1}))[0].token_ids
    check_idle(engine)


def test_n_answers_in_generate_and_stream(device: torch.device) -> None:
    """More answers than may run at once; a prompt that is refused has one."""
    engine = make_engine(device)
    params = [SamplingParams(n=5, max_tokens=4, temperature=1.0, seed=1), SamplingParams(max_tokens=3), SamplingParams(max_tokens=2)]
    prompts = [prompt_of(12), [], [5]]
    answers = engine.generate(prompts, params, on_error="return")
    assert [(each.index, each.sample, each.finish_reason) for each in answers] == [
        *((0, sample, "length") for sample in range(5)), (1, 0, "error"), (2, 0, "length"),
    ]  # fmt: skip
    ends = [event for event in engine.stream(prompts, params, on_error="return") if event.finish_reason is not None]
    assert sorted((end.index, end.sample) for end in ends) == [(each.index, each.sample) for each in answers]
    check_idle(engine)


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_cancelling_the_first_of_several_answers_leaves_the_others(device: torch.device, after: int) -> None:
    """At any time: before it runs, while its prompt is computed in chunks, and after."""
    engine = make_engine(device, scheduler={"max_num_seqs": 4, "max_batch_tokens": 8})
    params = SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=2)
    answers = engine.submit_samples(prompt_of(30), params)
    for _ in range(after):
        engine.step()
    engine.abort(answers[0])
    while engine.has_work:
        engine.step()
    assert answers[0].completion().finish_reason == "abort"
    for answer in answers[1:]:
        assert answer.completion().token_ids == reference(device, prompt_of(30), params, answer.request.seed)[0]
    check_idle(engine)


# -- bad input -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": {320: 1.0}}, "logit_bias: expected token ids from 0 to 319, got 320"),
        ({"allowed_token_ids": [1, 400]}, "allowed_token_ids: expected token ids from 0 to 319, got 400"),
        ({"stop_token_ids": [999]}, "stop_token_ids: expected token ids from 0 to 319, got 999"),
        ({"n": 2}, "n: submit makes one answer, got 2; call submit_samples"),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused(device: torch.device, given: dict[str, Any], message: str) -> None:
    engine = make_engine(device)
    with pytest.raises(RequestError, match=message):
        engine.submit([1], SamplingParams(**given))
    check_idle(engine)


@pytest.mark.parametrize(
    ("given", "mask"),
    [({"presence_penalty": 1.0}, None), ({"logit_bias": {1: 1.0}}, None), ({}, even_then_odd)],
    ids=["penalties", "bias", "mask"],
)
def test_state_without_memory_refuses_its_own_request(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], mask: Hook | None
) -> None:
    engine = make_engine(device)
    beside = engine.submit([5, 6], SamplingParams(max_tokens=4))

    def full(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("runtime.sampler.torch.zeros", full)
        patch.setattr("runtime.sampler.torch.full", full)
        with pytest.raises(RequestError, match=r"its state for scheduler.max_num_seqs = 4 requests takes 0 MiB, which (cpu|cuda)"):
            engine.submit([1], SamplingParams(**given), mask=mask)
    while engine.has_work:
        engine.step()
    assert beside.completion().finish_reason == "length"
    check_idle(engine)


def test_a_mask_is_for_one_answer(device: torch.device) -> None:
    with pytest.raises(RequestError, match="n: a mask belongs to one answer, got 2"):
        make_engine(device).submit_samples([1], SamplingParams(n=2), mask=even_then_odd)


@pytest.mark.parametrize(
    ("field", "value"),
    [("min_p", 1.5), ("min_p", -0.1), ("repetition_penalty", 0), ("repetition_penalty", float("inf")), ("presence_penalty", float("nan")),
     ("frequency_penalty", float("inf")), ("logit_bias", {-1: 2.0}), ("logit_bias", {1: float("nan")}), ("logit_bias", {"a": 1}),
     ("logit_bias", {i: 0.5 for i in range(1025)}), ("allowed_token_ids", []), ("logprobs", 21), ("logprobs", -1), ("n", 0),
     ("stop_token_ids", [-1])],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_sampling_parameters_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})
