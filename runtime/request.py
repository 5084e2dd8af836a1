"""What a user asks for, and what the scheduler knows about it: sampling parameters and one request's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

FinishReason = Literal["stop", "length", "abort", "error"]
TokenMask = Callable[[Sequence[int]], Any]
"""Called with the tokens of the answer so far, before each token is drawn: which tokens are allowed next, or None for all.

The answer is packed as xgrammar packs it: ceil(vocabulary / 32) int32, bit ``id % 32`` of word ``id // 32`` allows a token; an array or
a tensor on the CPU, of any shape.
"""
_SEEDS = 2**63
_APART = 0x9E3779B97F4A7C15  # the golden ratio's digits: seeds of samples are far apart, and from those of the next seeds' samples


class RequestError(ValueError):
    """A request that cannot be served. It is refused alone: the engine and the other requests go on."""


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class SamplingParams(BaseModel):
    """How tokens are drawn. The default is greedy. A draw depends on the seed, the token's number and the token id only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 takes the most likely token")
    top_k: int = Field(0, ge=0, lt=2**31, description="draw from the k most likely tokens; 0: from all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the smallest set of tokens whose probabilities reach p")
    min_p: float = Field(0.0, ge=0, le=1, description="draw from tokens at least so many times as likely as the likeliest; 0: from all")
    repetition_penalty: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="divides logits above 0 of tokens that prompt or answer have, multiplies those below"
    )
    presence_penalty: float = Field(0.0, allow_inf_nan=False, description="taken from the logits of tokens that the answer has")
    frequency_penalty: float = Field(0.0, allow_inf_nan=False, description="the same for each time that it has them")
    logit_bias: dict[_TokenId, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        {}, max_length=1024, description="token id -> what is added to its logit"
    )
    allowed_token_ids: Annotated[tuple[_TokenId, ...], Field(min_length=1)] | None = Field(
        None, description="no other tokens are drawn; null: any"
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="log-probabilities of each token and of so many of the likeliest, as the model gives them"
    )
    n: int = Field(1, ge=1, le=1024, description="answers to each prompt, which share its pages; each draws its own numbers")
    max_tokens: int = Field(128, ge=1, description="tokens to generate at most")
    seed: int | None = Field(None, ge=0, lt=2**63, description="of the draws; without one it is the request's number")
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)] = Field(
        (), description="strings that end the answer; they are not part of its text"
    )
    stop_token_ids: tuple[_TokenId, ...] = Field((), description="token ids that end the answer, which has them last")
    ignore_eos: bool = Field(False, description="go on after the end-of-sequence token")

    @property
    def penalises(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def adjusts(self) -> bool:
        """Whether more than temperature, top_k and top_p shapes a draw."""
        has_min_p = self.min_p > 0 and self.temperature > 0
        return has_min_p or self.penalises or bool(self.logit_bias) or self.allowed_token_ids is not None

    def named_tokens(self) -> dict[str, Sequence[int]]:
        """Parameter -> the token ids that it names."""
        return {
            "logit_bias": list(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }


class TokenLogprob(NamedTuple):
    """Log-probability of a drawn token, and of the likeliest ones, the likeliest first: as the model gives them, before temperature,
    penalties, bias and masks."""

    logprob: float
    top: dict[int, float]


@dataclass(eq=False, slots=True)
class Request:
    """One request as the scheduler sees it.

    tokens: the prompt and then the sampled tokens; it only ever grows, also over a preemption.
    num_computed: tokens whose K/V is certainly in ``pages``; num_scheduled: the same once the steps in flight are done.
    num_sampling: tokens that the steps in flight will still sample.
    """

    number: int  # order of arrival; also what a request without a seed is seeded with
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    eos_tokens: frozenset[int] = frozenset()
    salt: bytes = b""
    mask: TokenMask | None = None
    sample: int = 0  # which of the prompt's n answers this is
    first: Request | None = None  # the first of these answers, whose pages of the prompt it shares
    token_limit: int = 0  # prompt and answer at most; set when the scheduler accepts the request

    num_prompt: int = field(init=False)
    end_tokens: frozenset[int] = field(init=False)  # any of them ends the answer
    adjusts: bool = field(init=False)  # see SamplingParams.adjusts; a mask counts too
    lockstep: bool = field(init=False)  # the next token cannot be asked for before this one is known
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of the full pages of ``tokens``, chained
    num_registered: int = 0  # pages already offered to the prefix cache
    num_computed: int = 0
    num_scheduled: int = 0
    num_sampling: int = 0
    unsampled_in_flight: int = 0  # steps in flight that sample nothing for it: its prompt's chunks but the last
    row: int = -1  # its row in the runner's block table while it runs
    exhausted: bool = False  # the steps in flight sample its last token
    arrived_ms: float = 0.0  # by the scheduler's predicted clock
    num_cached: int = 0  # prompt tokens taken from the prefix cache at the first admission
    preemptions: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_tokens)
        self.num_prompt = len(self.tokens)
        self.end_tokens = (frozenset() if self.params.ignore_eos else self.eos_tokens) | frozenset(self.params.stop_token_ids)
        self.lockstep = self.mask is not None
        self.adjusts = self.lockstep or self.params.adjusts

    @property
    def in_flight(self) -> bool:
        """Whether a step in flight works on it."""
        return self.num_sampling > 0 or self.unsampled_in_flight > 0

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def seed(self) -> int:
        return self.number if self.params.seed is None else (self.params.seed + self.sample * _APART) % _SEEDS

    @property
    def num_to_run(self) -> int:
        """Tokens, known or still being sampled, that no step has been given yet. The last token of an answer is never run."""
        length = len(self.tokens) + self.num_sampling
        return 0 if length >= self.token_limit else length - self.num_scheduled
