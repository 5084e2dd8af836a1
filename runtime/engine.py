"""The engine: prompts in, answers out, many at once through continuous batching.

    engine = Engine("path/to/folder", {"scheduler": {"max_num_seqs": 8}})
    for completion in engine.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
        print(completion.text)

``generate`` and ``stream`` stand on ``submit``, ``step`` and ``abort``, which a server would call. One engine belongs to one
thread at a time, and a call of another one meanwhile is refused, but for ``abort``; several streams of a thread may run interleaved.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from runtime import metrics
from runtime.answer import Answer, Completion, Event
from runtime.captured_step import Address
from runtime.config import ConfigError, RuntimeConfig
from runtime.costs import StepCosts
from runtime.dispatch import Decision
from runtime.loading import Loaded, load
from runtime.measure import CostTable
from runtime.model import CausalLM
from runtime.parallel import is_follower, join
from runtime.prompts import Params, Prompt, prompts_with_params, token_ids
from runtime.request import Request, RequestError, SamplingParams, TokenLogprob, TokenMask
from runtime.runner import Launched, Runner
from runtime.sampler import pack_mask
from runtime.scheduler import Step, make_scheduler, table_rule
from runtime.text import TextStream, Tokenizer
from runtime.turn import Turn

OnError = Literal["raise", "return"]


class Engine:
    """Loads a model, sizes its cache, captures its steps, and serves requests until it is dropped.

    model: a Hugging Face folder or GGUF file, or a ``CausalLM``; it wins over ``[model] path``.
    config: a RuntimeConfig, a TOML file or a mapping. tokenizer: for a ``CausalLM`` that shall take text.
    report: called with one line at each stage of the start-up. progress: called with (done, total, what) during the warm-up.
    """

    def __init__(
        self,
        model: str | Path | CausalLM | None = None,
        config: RuntimeConfig | str | Path | Mapping[str, Any] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        report: Callable[[str], None] = lambda line: None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        started = time.perf_counter()
        self._turn = Turn()  # two threads at once would compose steps of what is half changed: wrong tokens, where nothing fails
        self._lock = threading.RLock()  # of who changes requests just now; others wait, for a step at most
        self.config = RuntimeConfig.load({} if config is None else config)
        costs = self.config.graph.cost_table
        if costs and (obstacle := CostTable.obstacle(costs)):  # now, not after the warm-up
            raise ConfigError(f"graph.cost_table: {costs}: {obstacle}")
        serves_metrics = self.config.metrics.port > 0 and not is_follower()  # one rank speaks for all
        if serves_metrics:
            metrics.check(self.config.metrics)
        parallel = join(self.config)
        if isinstance(model, CausalLM) and parallel != getattr(model, "parallel", None):
            raise ConfigError(f"parallel.tensor: the model given was not made for these {self.config.parallel.tensor} ranks")
        self.model, self.tokenizer, self._eos = (
            Loaded(model, None, frozenset())
            if isinstance(model, CausalLM)
            else load(model or self.config.model.path, self.config.model, report, parallel)
        )
        self.tokenizer = tokenizer or self.tokenizer
        limits, longest = self.config.scheduler, self.model.spec.max_positions
        if limits.max_context > longest:
            raise ConfigError(f"scheduler.max_context: expected at most the model's {longest}, got {limits.max_context}")
        max_context = limits.max_context or longest
        self.runner = Runner(self.model, self.config, max_context)
        report(f"KV cache: {self.runner.num_pages} pages of {self.runner.page_size} tokens on {self.runner.device}")
        self.plan = self.runner.warmup(progress)
        rows = self.runner.rows_by_kind()
        self.scheduler = make_scheduler(
            self.config,
            StepCosts(rows["decode"], rows["mixed"], rule=table_rule(self.config)),
            num_pages=self.runner.num_pages,
            max_context=max_context,
        )
        self._depth = 2 if limits.overlap else 1  # steps in flight
        self._flying: deque[tuple[Step, Launched]] = deque()
        self._answers: dict[int, Answer] = {}
        self._submitted = 0
        self._masked = False  # whether any request ever had a mask
        self._totals: Counter[str] = Counter()
        # Last, so that nobody is told of an engine that did not come up.
        self.metrics = metrics.Metrics(self, self.config.metrics) if serves_metrics else None
        self.startup_seconds = time.perf_counter() - started

    def use_costs(self, table: StepCosts) -> None:
        """Compose steps by this table (``runtime.step_costs``) instead of the warm-up's own costs. Only while nothing runs."""
        if self.has_work:
            raise RuntimeError("use_costs: requests are under way; finish or abort them first")
        context = self.scheduler.model_context
        self.scheduler = make_scheduler(self.config, table, num_pages=self.runner.num_pages, max_context=context)

    def reset_prefix_cache(self) -> None:
        """Forget the cached prefixes: after the model's weights were changed, as K/V of the old ones would be taken for theirs. Only while
        nothing runs."""
        if self.has_work:
            raise RuntimeError("reset_prefix_cache: requests are under way; finish or abort them first")
        self.scheduler.blocks.clear_cache()

    # -- whole answers --------------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params = None, *, chat: bool = False, on_error: OnError = "raise"
    ) -> list[Completion]:
        """Answers to all prompts, in their order, computed together.

        prompts: texts, or lists of token ids; also one of them alone. params: for all, or one each. With ``n`` > 1 a prompt's answers
        stand next to each other.
        chat: put each text through the model's chat template.
        on_error: a prompt that cannot be served (empty, too long, unknown token) raises RequestError before anything runs, or with
        "return" comes back as a Completion with finish_reason "error" and its message, while the others are served.
        """
        with self._turn:
            answers = self._submit_all(prompts, params, chat, on_error, whole=True)
            try:
                for answer in answers:
                    while isinstance(answer, Answer) and not answer.finished:
                        self.step()
            finally:
                self._drop(answers)
        return [answer.completion() if isinstance(answer, Answer) else answer for answer in answers]

    def stream(
        self, prompts: Prompt | Iterable[Prompt], params: Params = None, *, chat: bool = False, on_error: OnError = "raise"
    ) -> Iterator[Event]:
        """The same answers as ``generate``, as they grow. Leaving the loop early ends the requests."""
        events: deque[Event] = deque()
        answers = self._submit_all(prompts, params, chat, on_error, events)  # at the call, not at the first item: errors come here
        taken = self._take(answers, events)
        next(taken)
        return taken

    def _take(self, answers: list[Answer | Completion], events: deque[Event]) -> Iterator[Event]:
        """The events, after one that is none: ``stream`` takes it, so that dropping the iterator unread ends the requests too."""
        try:
            yield Event(-1, "", [])
            for answer in answers:
                if isinstance(answer, Completion):
                    yield Event(answer.index, "", [], "error", answer.error)
            unfinished = sum(isinstance(answer, Answer) for answer in answers)
            while unfinished:
                while not events:
                    self.step()
                event = events.popleft()
                unfinished -= event.finish_reason is not None
                yield event
        finally:
            self._drop(answers)

    def _submit_all(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: Params,
        chat: bool,
        on_error: str,
        events: deque[Event] | None = None,
        whole: bool = False,
    ) -> list[Answer | Completion]:
        if on_error not in ("raise", "return"):
            raise ValueError(f'on_error: expected "raise" or "return", got {on_error!r}')
        given = prompts_with_params(prompts, params)
        answers: list[Answer | Completion] = []
        try:
            for index, (prompt, each) in enumerate(given):
                try:
                    answers += self.submit_samples(prompt, each, chat=chat, index=index, events=events, whole=whole)
                except RequestError as error:
                    refused = RequestError(f"prompt {index}: {error}")
                    if on_error == "raise":
                        raise refused from error
                    answers.append(Completion.refused(refused, index))
        except BaseException:
            self._drop(answers)
            raise
        return answers

    def _drop(self, answers: Sequence[Answer | Completion]) -> None:
        with self._lock:
            for answer in answers:
                if isinstance(answer, Answer):
                    self.abort(answer)
            while self._flying and not self._answers:  # of requests that ended one step ago: nobody else would take these steps in
                self._land()

    # -- one request, one step ------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        salt: bytes = b"",
        mask: TokenMask | None = None,
        index: int = 0,
        events: deque[Event] | None = None,
        whole: bool = False,
    ) -> Answer:
        """Queue one request; ``step`` then makes it grow. Raises RequestError.

        salt: only requests of equal salt share pages of the prefix cache. mask: which tokens are allowed next, asked before each; a
        grammar, say. index, events: what its events are numbered with, and where they go (default: a queue of its own). whole: one event
        alone, when the answer has ended; the steps before then spend no time on it.
        """
        if params is not None and params.n != 1:
            raise RequestError(f"n: submit makes one answer, got {params.n}; call submit_samples")
        return self.submit_samples(prompt, params, chat=chat, salt=salt, mask=mask, index=index, events=events, whole=whole)[0]

    def submit_samples(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        salt: bytes = b"",
        mask: TokenMask | None = None,
        index: int = 0,
        events: deque[Event] | None = None,
        whole: bool = False,
    ) -> list[Answer]:
        """Queue the ``n`` answers that ``params`` asks for; all but the first share its pages of the prompt. As ``submit`` otherwise."""
        if not isinstance(salt, bytes):
            raise TypeError(f"salt: expected bytes, got {salt!r}")
        tokens = tuple(token_ids(prompt, self.tokenizer, self.model.spec.vocab, chat=chat))
        params = params or SamplingParams()
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none")
        if mask is not None and params.n != 1:
            raise RequestError(f"n: a mask belongs to one answer, got {params.n}; call submit for each, with a mask of its own")
        vocab = self.model.spec.vocab
        for name, ids in params.named_tokens().items():
            if ids and max(ids) >= vocab:
                raise RequestError(f"{name}: expected token ids from 0 to {vocab - 1}, got {max(ids)}")
        self.runner.sampler.prepare(params, mask is not None)  # now: what fails in a step fails for all that run
        answers: list[Answer] = []
        with self._turn, self._lock:
            for sample in range(params.n):
                first = answers[0].request if answers else None
                request = Request(self._submitted, tokens, params, self._eos, salt, mask, sample, first)
                self.scheduler.add(request)
                self._submitted += 1
                self._masked |= mask is not None
                stream = None if self.tokenizer is None else TextStream(self.tokenizer, params.stop)
                answer = self._answers[request.number] = Answer(request, stream, index, deque() if events is None else events, whole)
                answers.append(answer)
                if self.metrics is not None:
                    self.metrics.arrived(request.number)
        return answers

    def abort(self, answer: Answer) -> None:
        """End a request. Its pages come back as soon as no step in flight uses them."""
        with self._lock:  # in anybody's turn: who ends requests may be the collector of garbage, in any thread
            if answer.finished:
                return
            if self._answers.get(answer.request.number) is not answer:
                raise ValueError("answer: it was not submitted to this engine")
            self.scheduler.finish(answer.request, "abort")
            self._end(answer)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> None:
        """Launch what can run, then take in the oldest step in flight and hand its tokens to their answers.

        A step that fails ends the requests in flight with the reason "error" and raises; the engine can be used on.
        """
        with self._turn, self._lock:
            while len(self._flying) < self._depth and (step := self.scheduler.schedule()) is not None:
                with self._failing(step):
                    self._flying.append((step, self.runner.launch(step, self._masks(step) if self._masked else None)))
            if self._flying:
                self._land()

    def _land(self) -> None:
        """Take in the oldest step in flight."""
        step, launched = self._flying.popleft()
        with self._failing(step):
            tokens, logprobs = self.runner.read(launched), self.runner.read_logprobs(launched)
        answers, totals = self._answers, self._totals
        totals["steps"] += 1
        totals["prompt_tokens"] += sum([count for _, _, count, _, generated in step.rows if count > 1 or generated == 0])
        grown = self.scheduler.complete(step, tokens)
        totals["generated_tokens"] += len(grown)
        if self.metrics is not None:
            self.metrics.tokens([request.number for request in grown])
        for request in grown:
            answer = answers[request.number]
            if not answer.is_silent or request.finish_reason is not None:
                self._deliver(answer, logprobs.get(request.number))

    def _masks(self, step: Step) -> dict[int, Any]:
        """What the masks of the step's requests allow. One that fails ends its own request."""
        masks = {}
        for request, _, _, samples, _ in step.rows:
            if request.mask is not None and samples:
                try:
                    words, allowed = request.mask(request.generated), request.params.allowed_token_ids
                    masks[request.number] = pack_mask(words, self.model.spec.vocab, allowed)
                except Exception as error:
                    answer = self._answers[request.number]
                    answer.error = f"mask: {error}" if isinstance(error, ValueError) else f"mask: {type(error).__name__}: {error}"
                    self.scheduler.finish(request, "error")
                    self._end(answer)
        return masks

    @contextmanager
    def _failing(self, step: Step) -> Iterator[None]:
        """What fails here ends the requests of this step and of all in flight: they stand on what it should have written."""
        try:
            yield
        except BaseException:
            for failed in (step, *(step for step, _ in self._flying)):
                for request in self.scheduler.abandon(failed):
                    self._end(self._answers[request.number])
            self._flying.clear()
            raise

    def _deliver(self, answer: Answer, logprob: TokenLogprob | None) -> None:
        """Hand a request's newest token to its answer."""
        request, stream, text = answer.request, answer.stream, ""
        token = request.tokens[-1]
        if stream is not None and not answer.is_silent:
            text = stream.push(token)
            if stream.stopped:
                self.scheduler.finish(request, "stop")
                request.finish_reason = "stop"  # also where the same token ended it by length
        answer.report(text, [token], None if logprob is None else [logprob])
        if answer.finished:
            self._ended(answer)

    def _end(self, answer: Answer) -> None:
        """Tell an answer that its request has been ended."""
        answer.report("", [])
        self._ended(answer)

    def _ended(self, answer: Answer) -> None:
        del self._answers[answer.request.number]
        if self.metrics is not None:
            self.metrics.ended(answer.request.number, answer.request.finish_reason or "")

    def explain(self, decodes: int, chunk: int = 0, context: int | None = None) -> Decision:
        """How a step of ``decodes`` decoding requests and ``chunk`` tokens of a prompt would run, and why.

        context: tokens that each of them holds, by default the usual number; the nearest measured one decides.
        """
        return self.runner.steps.at(context).explain(**self.runner.batch(decodes, chunk))

    def addresses(self) -> dict[str, list[Address]]:
        """For each kind of captured step, at its largest size: every input of every piece, its owner and address."""
        return self.runner.steps.addresses()

    def load(self) -> dict[str, float]:
        """What there is now: requests that run and that wait, pages of the cache that are held, and their share."""
        blocks = self.scheduler.blocks
        held = blocks.usable_pages - blocks.num_available
        return {
            "requests_running": len(self.scheduler.running),
            "requests_waiting": len(self.scheduler.waiting),
            "cache_pages_held": held,
            "cache_share_held": held / blocks.usable_pages,
        }

    # -- what happened --------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """``counts``, and under ``modes`` also the bytes of graphs and inputs."""
        return self.counts() | {"modes": self.runner.steps.stats()}

    def counts(self) -> dict[str, Any]:
        """Counts since the start: steps and tokens, and under ``modes`` what ran captured, at which sizes, and what did not."""
        return {
            **{name: self._totals[name] for name in ("steps", "prompt_tokens", "generated_tokens")},
            "cached_tokens": self.scheduler.cached_tokens,
            "preemptions": self.scheduler.preemptions,
            "evicted_pages": self.scheduler.blocks.evictions,
            "modes": self.runner.steps.counts(),
        }
