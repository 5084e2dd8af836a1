"""What comes back from the engine: whole (``Completion``), step by step (``Event``), and the state between (``Answer``)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from runtime.request import FinishReason, Request, RequestError, TokenLogprob
from runtime.text import TextStream


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. ``token_ids`` holds every sampled token, an end-of-sequence token included; ``text`` ends before a stop string.

    index, sample: of the prompt, and of its n answers. logprobs: one for each token, if they were asked for. cached_tokens: those of the
    prompt whose K/V lay in the prefix cache when it was first let in.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    index: int = field(default=0, compare=False)
    sample: int = 0
    cached_tokens: int = field(default=0, compare=False)

    @classmethod
    def refused(cls, error: RequestError, index: int) -> Completion:
        return cls("", [], "error", [], str(error), index=index)


@dataclass(slots=True)
class Event:
    """What one step brought for one answer (``sample``) to one prompt (``index``, as given to ``stream``). The last event of an answer
    has a finish reason. logprobs: one for each token, if they were asked for."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    sample: int = 0


@dataclass(eq=False, slots=True)
class Answer:
    """A submitted request: what has arrived, and the events that the caller has not taken yet.

    whole: it has one event, at its end, so that the steps before need not look at it (``is_silent``) unless text or log-probabilities
    are to be noted as they come.
    """

    request: Request
    stream: TextStream | None
    index: int = 0
    events: deque[Event] = field(default_factory=deque)
    whole: bool = False
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    finished: bool = False
    is_silent: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.request.params
        self.is_silent = self.whole and not params.stop and params.logprobs is None

    def report(self, text: str, tokens: list[int], logprobs: list[TokenLogprob] | None = None) -> None:
        """Add an event: the last one, with all text that was held back, when the request has ended."""
        request = self.request
        reason = request.finish_reason
        if reason is not None:
            self.finished = True
            if self.stream is not None:
                text += self.stream.finish(request.generated if self.is_silent else ())
        self.text += text
        if logprobs is not None:
            self.logprobs += logprobs
        if not self.whole:
            self.events.append(Event(self.index, text, tokens, reason, self.error, logprobs, request.sample))
        elif reason is not None:
            logprobs = None if request.params.logprobs is None else self.logprobs
            self.events.append(Event(self.index, self.text, request.generated, reason, self.error, logprobs, request.sample))

    def completion(self) -> Completion:
        request = self.request
        assert request.finish_reason is not None, "the request has not ended"
        logprobs = None if request.params.logprobs is None else self.logprobs
        return Completion(
            self.text,
            request.generated,
            request.finish_reason,
            list(request.prompt_tokens),
            self.error,
            logprobs,
            self.index,
            request.sample,
            request.num_cached,
        )
