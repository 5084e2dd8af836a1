"""One step on the device: the scheduler's chunks become arrays, the model runs over them, tokens come back.

The host knows nothing of graphs here. Arrays are made at the step's real sizes; ``graphed`` pads them to a captured size. Every
tensor that varies from step to step is an input, so a graph bakes in only the bound on the query length (``max_query_len``).

Sampled tokens stay on the device: a chunk whose last token a step in flight is still sampling takes it from ``last_tokens``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from runtime import ranks
from runtime.calls import is_autocast
from runtime.config import ConfigError, RuntimeConfig
from runtime.graph import AS_IS, Within
from runtime.graphed import GraphedModule, graphed
from runtime.model import CausalLM, allocate_cache
from runtime.outputs import taken
from runtime.plan import Plan, PlanRow
from runtime.request import TokenLogprob
from runtime.sampler import Pending, SlotSampler
from runtime.scheduler import Step
from runtime.sizes import plain_sizes
from runtime.step_arrays import StepArrays, from_chunks, offsets_of
from runtime.step_module import DYNAMIC, PAD, StepModule
from tkernels import _dependent, collectives
from tkernels.attention._inputs import MAX_PAGE, MAX_SEQS

_GOLDEN = 0.6180339887498949  # whose multiples lie evenly between whole numbers
_WARMUP_CONTEXT = 1024  # tokens of context that a step is timed with; half of what a request may have, where that is less
_OTHER_CONTEXTS = (128, 8192)  # and with these, as the mode that is cheapest may change with the share of attention
_CPU_PROOF_CONTEXT = 24  # and one that it is proved with without a GPU: more than a page
_CPU_CACHE_BYTES = 1 << 30


class Launched(NamedTuple):
    """A step on its way: the tokens land in ``host``; read it through ``Runner.read`` only."""

    host: torch.Tensor
    event: torch.cuda.Event | None
    logprobs: Pending | None = None


class Runner:
    """Owns the KV cache, the captured steps and the rows of the block table."""

    def __init__(self, model: CausalLM, config: RuntimeConfig, max_context: int) -> None:
        self.model, self.config = model, config
        self.device = model.embed_tokens.device
        self.page_size = config.cache.page_size
        self.max_num_seqs, self.max_batch_tokens = config.scheduler.max_num_seqs, config.scheduler.max_batch_tokens
        self.module = StepModule(model, self.max_num_seqs, gives_logits=True)
        stored, own = config.cache.dtype, str(model.spec.dtype).removeprefix("torch.")
        if stored not in ("auto", "fp8_e4m3", own):
            raise ConfigError(f'cache.dtype: expected "auto", the model\'s "{own}" or "fp8_e4m3", got "{stored}"')
        for key, value, most in (("cache.page_size", self.page_size, MAX_PAGE), ("scheduler.max_num_seqs", self.max_num_seqs, MAX_SEQS)):
            if value > most:
                raise ConfigError(f"{key}: expected at most {most}, which is what the attention kernels take, got {value}")
        self.num_pages = self._choose_num_pages(max_context)
        self._caches = self._allocate_cache(self.num_pages)
        model.bind_cache(self._caches)
        self._buffers_of_first = cast(Any, model.layers[0]).attention._buffers
        # A request holds at most what the pool has, so a table needs no more columns than that, and never fewer.
        self.max_context = min(max_context, (self.num_pages - 1) * self.page_size)
        self.num_columns = -(-self.max_context // self.page_size)
        # Lent: a step's tokens are copied at once to where they belong; most steps do not look at its logits, or at once.
        lent = (0, 1)
        self.steps: GraphedModule = graphed(
            self.module, _with_plain_graphs(config), dynamic=DYNAMIC, pad=PAD, bounds={"seqs": self.max_num_seqs}, borrow=lent,
            within=_captures_within(config, self.device),
        )  # fmt: skip
        self.sampler = SlotSampler(model.spec.vocab, self.max_num_seqs, self.device)
        self.inputs = StepArrays(self.max_num_seqs, self.num_columns, self.page_size, self.sampler.admit)

    # -- sizing ---------------------------------------------------------------------------------------------------------------

    def _allocate_cache(self, num_pages: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        config, spec = self.config.cache, self.model.spec
        try:
            return allocate_cache(spec, num_pages, self.page_size, config.dtype, self.device)
        except (RuntimeError, TypeError) as error:  # torch has no one error for it on the CPU; TypeError where a size is no int64
            token_bytes = sum(k.nbytes + v.nbytes for k, v in allocate_cache(spec, 1, 1, config.dtype, self.device))
            raise ConfigError(
                f"cache.num_pages: {num_pages} pages of cache.page_size = {self.page_size} tokens take "
                f"{num_pages * self.page_size * token_bytes / 2**30:.1f} GiB, which {self.device} does not have; "
                'set fewer, or "auto" for what fits'
            ) from error

    def _choose_num_pages(self, max_context: int) -> int:
        """The configured count, or from memory.

        CUDA: what is free, less the graphs' budget, less what a step of ``max_batch_tokens`` needs while it runs, less 5%.
        CPU: a GiB or a quarter of the free memory, whichever is less. Neither takes more than all requests at full context need.
        """
        configured = self.config.cache.num_pages
        if configured != "auto":
            if configured < 2:
                raise ConfigError(f"cache.num_pages: expected at least 2 (page 0 is reserved for padding), got {configured}")
            return configured
        spec, page_size = self.model.spec, self.page_size
        probe = allocate_cache(spec, 2, page_size, self.config.cache.dtype, self.device)
        page_bytes = sum(k[0].nbytes + v[0].nbytes for k, v in probe)
        if self.device.type == "cuda":
            self.model.bind_cache(probe)
            free = self._free_after_largest_step(max_context) - self.config.graph.memory_budget
        else:
            free = min(_CPU_CACHE_BYTES, _free_host_bytes() // 4)
        wanted = self.max_num_seqs * -(-max_context // page_size) + 1
        fits = free // page_bytes
        if fits < 2:
            raise ConfigError(
                f"cache.num_pages: no memory for a KV cache: {max(free, 0) >> 20} MiB are left beside weights, a step of "
                f"scheduler.max_batch_tokens = {self.max_batch_tokens} and graph.memory_budget, a page takes {page_bytes >> 10} KiB; "
                "lower one of these or set cache.num_pages"
            )
        return int(ranks.smallest(min(wanted, fits)))

    def _free_after_largest_step(self, max_context: int) -> int:
        """Free bytes of the GPU less what the largest step allocates while it runs, which is tried out on a cache of two pages."""
        device = self.device
        self.num_pages, self.max_context, self.num_columns = 2, max_context, -(-max_context // self.page_size)
        chunk = min(self.max_batch_tokens, self.max_num_seqs * max_context)
        arguments = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in self.batch(0, chunk).items()}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            self.module(**arguments)
        torch.cuda.synchronize(device)
        needed = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return int(free - needed - 0.05 * total)

    # -- steps ----------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, step: Step, masks: Mapping[int, np.ndarray] | None = None) -> Launched:
        """Start a step. Does not wait for the device. masks: by request number, what its mask allows for this step's token."""
        if is_autocast(self.device.type):  # the caller's, for other modules than this: its cache has one dtype, and so have its graphs
            with torch.autocast(self.device.type, enabled=False):
                return self.launch(step, masks)
        if self._buffers_of_first["k_cache"] is not self._caches[0][0]:
            raise RuntimeError("the model's KV cache belongs to another engine now: make one engine for each model")
        arrays, seqs = self.inputs.of(step), len(step.rows)
        widest = self.inputs.widest
        sizes = {"tokens": len(arrays["input_ids"]), "seqs": seqs}
        context = int(arrays["seq_lens"].sum()) // seqs
        staged = self.steps.stage(sizes, context=context, max_query_len=self.bound(widest))
        if staged is not None:
            note = staged.note
            note.now = self.inputs.write(arrays, staged.arrays, note.before)
            note.widths = {"block_table": self.inputs.table.widest}
            if self.config.graph.check == "poison":
                self.inputs.check(arrays, staged.arrays)
            tokens, logits = staged()
        else:
            tokens, logits = self.steps.at(context)(**self._as_arguments({**arrays, "block_table": self.inputs.wide_table()}, widest))
        tokens = taken(tokens)  # until the next step, which comes behind the copies below
        logprobs = None
        if self.inputs.asks_more:
            tokens, logprobs = self.sampler.run(step, tokens, logits, masks or {})
        self.module.last_tokens[:seqs].copy_(tokens)
        self.inputs.launched()
        if self.device.type != "cuda":
            return Launched(tokens.clone(), None, logprobs)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, device="cpu", pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))  # the current device may be another one
        return Launched(host, event, logprobs)

    def read(self, launched: Launched) -> list[int]:
        """The step's tokens, one a chunk. Waits for the copy to the host: without that the numbers may not be there yet."""
        if launched.event is not None:
            launched.event.synchronize()
        collectives.check()  # what came while a rank was missing is no answer
        return launched.host.tolist()

    def read_logprobs(self, launched: Launched) -> dict[int, TokenLogprob]:
        """What requests wanted of the step's tokens, by request number; after ``read``."""
        return {} if launched.logprobs is None else launched.logprobs.read()

    def bound(self, max_query_len: int) -> int:
        """What a graph is made for: 1 (every query has one token) or all tokens of the largest step."""
        return 1 if max_query_len == 1 else self.max_batch_tokens

    def arguments(self, step: Step) -> dict[str, Any]:
        """The inputs of one step, on the host, at its real sizes."""
        return self._as_arguments({**self.inputs.of(step), "block_table": self.inputs.wide_table()}, step.max_query_len)

    def _as_arguments(self, arrays: Mapping[str, np.ndarray], widest: int) -> dict[str, Any]:
        tensors = {name: torch.from_numpy(array if array.flags.writeable else array.copy()) for name, array in arrays.items()}
        return {**tensors, "max_query_len": self.bound(widest)}

    # -- warm-up --------------------------------------------------------------------------------------------------------------

    def warmup(self, progress: Callable[[int, int, str], None] | None = None) -> Plan:
        """Capture and time every size, for steps of single tokens (decode) and for steps with a chunk of a prompt."""
        if self.device.type == "cuda":  # elsewhere nothing is compiled
            self.sampler.warm_up(self.model.embed_tokens.dtype)
        keys = [{"max_query_len": 1}]
        mixed = {"max_query_len": self.max_batch_tokens}
        if any(self._representative(size, mixed) for size in range(2, self.config.graph.max_tokens + 1)):
            keys.append(mixed)  # else no such step is small enough for a graph, and all of them run eager
        # Without a GPU no kernel shares a long context out, and time is dear: there a short one proves as much.
        proof = partial(self._representative, context=_CPU_PROOF_CONTEXT) if self.device.type == "cpu" else None
        return self.steps.warmup(
            make_inputs=self._representative,
            make_proof_inputs=proof,
            keys=keys,
            modes=[("full",), ("piecewise",)][: len(keys)] if self.config.plain_graphs else (),
            contexts=self.contexts,
            progress=progress,
        )

    @property
    def contexts(self) -> list[int]:
        """Tokens of context that steps are timed with, the usual number first; at most half of what a request may have.

        On a CPU "auto" is one: attention is no large part there, and time is dear.
        """
        configured = self.config.graph.contexts
        auto = [_WARMUP_CONTEXT, *(_OTHER_CONTEXTS if self.device.type == "cuda" else ())]
        wanted = auto if configured == "auto" or not configured else configured
        return list(dict.fromkeys(max(1, min(context, self.max_context // 2)) for context in wanted))

    def rows_by_kind(self) -> dict[str, list[PlanRow]]:
        """The plan's rows for steps of single tokens ("decode") and for steps with a chunk of a prompt in them ("mixed")."""
        rows = self.steps.plan.rows if self.steps.plan is not None else []
        keys = {"decode": "max_query_len=1", "mixed": f"max_query_len={self.max_batch_tokens}"}
        return {kind: [row for row in rows if row.key == key] for kind, key in keys.items()}

    def pick(self, tokens: int, prompts: bool) -> tuple[str, int]:
        """Mode and size that serve a step of so many tokens at the usual context, with chunks of prompts in it or without."""
        sizes = {"tokens": tokens, "seqs": min(tokens, self.max_num_seqs)}
        decision = self.steps.pick(sizes, max_query_len=self.max_batch_tokens if prompts else 1)
        return decision.mode, decision.size

    def _representative(self, size: int, key: Mapping[str, Any], context: int | None = None) -> tuple[tuple[()], dict[str, Any]] | None:
        """A step of ``size`` tokens as traffic makes them: all decode, or up to half of them decode beside chunks of prompts.

        None for a size that cannot occur: more tokens than a step may have, more decodes than requests may run, a chunk of one token,
        more than all contexts hold.
        """
        if size > self.max_batch_tokens:
            return None
        if key["max_query_len"] == 1:
            return ((), self.batch(size, 0, context)) if size <= self.max_num_seqs else None
        for decodes in range(min(size // 2, self.max_num_seqs - 1), -1, -1):
            if size > 1 and decodes + self._num_prompts(size - decodes) <= self.max_num_seqs:
                return (), self.batch(decodes, size - decodes, context)
        return None

    def _num_prompts(self, tokens: int) -> int:
        return -(-tokens // self.max_context)

    def batch(self, decodes: int, prompt_tokens: int, context: int | None = None) -> dict[str, Any]:
        """Inputs of ``decodes`` requests and, beside them, ``prompt_tokens`` in as few prompts as hold them.

        context: tokens that each holds already, by default the usual number; at most half of what a request may have. Those that decode
        hold between half and one and a half times as many, and on average just so many: attention is a little faster for sequences of
        equal length, which traffic does not have.

        They read pages of the cache and write none (every slot is -1), so they can run at any time, also between requests.
        """
        prompts = self._num_prompts(prompt_tokens)
        if min(decodes, prompt_tokens) < 0 or decodes + prompts > self.max_num_seqs or decodes + prompt_tokens < 1:
            raise ValueError(
                f"batch: expected 1 to {self.max_num_seqs} requests of up to {self.max_context} tokens, got {decodes} that decode "
                f"and {prompt_tokens} prompt tokens"
            )
        context = min(self.contexts[0] if context is None else context, self.max_context // 2)
        chunks = [prompt_tokens // prompts + (i < prompt_tokens % prompts) for i in range(prompts)]
        counts = np.array([1] * decodes + chunks)
        starts = np.minimum(np.array([*_spread(context, decodes), *[context] * prompts]), self.max_context - counts)
        pages = np.arange(len(counts) * self.num_columns).reshape(len(counts), self.num_columns)
        table = (pages % (self.num_pages - 1) + 1).astype(np.int32)
        zeros = np.zeros(len(counts), np.int64)
        size = decodes + prompt_tokens
        arrays = from_chunks(
            starts,
            counts,
            offsets_of(counts),
            table,
            np.arange(len(counts)),
            self.page_size,
            input_ids=np.arange(size) % self.model.spec.vocab,
            token_source=np.full(size, -1, np.int64),
            temperature=zeros.astype(np.float32),
            top_k=zeros.astype(np.int32),
            top_p=np.ones(len(counts), np.float32),
            seeds=zeros,
            draws=zeros,
        )
        arrays |= {"slot_mapping": np.full(size, -1, np.int64), "block_table": table}
        return self._as_arguments(arrays, self.max_batch_tokens if prompts else 1)


def _spread(mean: int, count: int) -> list[int]:
    """``count`` numbers between half of ``mean`` and one and a half of it, in pairs about it; the first ones of more are the same."""
    away = [int(mean / 2 * ((i // 2 + 1) * _GOLDEN % 1.0)) for i in range(count)]
    lone = count - 1 if count % 2 else count
    return [mean + (-away[i] if i % 2 else away[i]) * (i != lone) for i in range(count)]


def _with_plain_graphs(config: RuntimeConfig) -> RuntimeConfig:
    """The configuration that the steps are captured by; another one than the user's for the plain scheme only."""
    if not config.plain_graphs:
        return config
    sizes = plain_sizes(config.graph.max_tokens) if config.graph.capture_sizes == "auto" else config.graph.capture_sizes
    return config.override(**{"graph.pick": "nearest", "graph.capture_sizes": sizes})


def _captures_within(config: RuntimeConfig, device: torch.device) -> Within:
    """Dependent launches, if they are wanted: the model's steps write none of its weights, which is what they require."""
    wanted = config.model.dependent_launch
    if device.type != "cuda" or (wanted == "auto" and config.parallel.tensor > 1):
        return AS_IS
    return Within("dependent launch" if wanted else "no dependent launch", partial(_dependent.captures, bool(wanted)))


def _free_host_bytes() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not everywhere
        return _CPU_CACHE_BYTES
