"""What a user asks for, and what the scheduler knows about it: sampling parameters and one request's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(ValueError):
    """A request that cannot be served. It is refused alone: the engine and the other requests go on."""


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class SamplingParams(BaseModel):
    """How tokens are drawn. The default is greedy. A draw depends on the seed, the token's number and the token id only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 takes the most likely token")
    top_k: int = Field(0, ge=0, lt=2**31, description="draw from the k most likely tokens; 0: from all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the smallest set of tokens whose probabilities reach p")
    max_tokens: int = Field(128, ge=1, description="tokens to generate at most")
    seed: int | None = Field(None, ge=0, lt=2**63, description="of the draws; without one it is the request's number")
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)] = Field(
        (), description="strings that end the answer; they are not part of its text"
    )
    ignore_eos: bool = Field(False, description="go on after the end-of-sequence token")


@dataclass(eq=False, slots=True)
class Request:
    """One request as the scheduler sees it.

    tokens: the prompt and then the sampled tokens; it only ever grows, also over a preemption (B155).
    num_computed: tokens whose K/V is certainly in ``pages``; num_scheduled: the same once the steps in flight are done.
    num_sampling: tokens that the steps in flight will still sample.
    """

    number: int  # order of arrival; also what a request without a seed is seeded with
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    eos_tokens: frozenset[int] = frozenset()
    salt: bytes = b""
    token_limit: int = 0  # prompt and answer at most; set when the scheduler accepts the request

    num_prompt: int = field(init=False)
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of the full pages of ``tokens``, chained
    num_registered: int = 0  # pages already offered to the prefix cache
    num_computed: int = 0
    num_scheduled: int = 0
    num_sampling: int = 0
    steps_in_flight: int = 0
    row: int = -1  # its row in the runner's block table while it runs
    exhausted: bool = False  # the steps in flight sample its last token
    arrived_ms: float = 0.0  # by the scheduler's predicted clock
    num_cached: int = 0  # prompt tokens taken from the prefix cache at the first admission
    preemptions: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_tokens)
        self.num_prompt = len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def seed(self) -> int:
        return self.number if self.params.seed is None else self.params.seed

    @property
    def num_to_run(self) -> int:
        """Tokens, known or still being sampled, that no step has been given yet. The last token of an answer is never run."""
        length = len(self.tokens) + self.num_sampling
        return 0 if length >= self.token_limit else length - self.num_scheduled
