"""Makes the table of few-row linear layers for the device at hand: ``python -m tkernels tune``.

For every shape, fusion and row class each tile is checked against fp64, then timed next to the composition (cuBLAS and the single
ops) inside one CUDA graph over weights rotated past L2; the variants take turns and the median counts. A tile enters the table only
where it is faster than the composition. With a rotation the composition is ``linear`` and ``rope_and_cache``, or a norm before what is
fused without it, and where that wins the table says so too.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tkernels._linear_kernels import ROW_CLASSES, Tile, launch
from tkernels._qkv_kernels import launch as launch_qkv
from tkernels._target import target_of
from tkernels.activation import silu_and_mul
from tkernels.linear import linear, linear_ref
from tkernels.qkv import linear_rope_and_cache_ref
from tkernels.rmsnorm import rms_norm
from tkernels.rope import rope_and_cache

Shape = tuple[int, int, str]  # (out_features, in_features, the place in the model)
SHAPES: dict[str, list[Shape]] = {
    "Llama 1B": [(3072, 2048, "qkv"), (2048, 2048, "o"), (16384, 2048, "gate_up"), (2048, 8192, "down"), (128256, 2048, "head")],
    "Llama 8B": [(6144, 4096, "qkv"), (4096, 4096, "o"), (28672, 4096, "gate_up"), (4096, 14336, "down"), (128256, 4096, "head")],
    "SmolLM2 135M": [(960, 576, "qkv"), (576, 576, "o"), (3072, 576, "gate_up"), (576, 1536, "down"), (49152, 576, "head")],
}
VARIANTS = {
    "qkv": ("plain", "norm", "rope", "norm+rope"), "o": ("plain", "residual"), "gate_up": ("gated", "norm+gated"),
    "down": ("plain", "residual"), "rope": ("rope", "norm+rope"), "head": ("plain", "norm"), "any": ("plain", "norm"),
}  # fmt: skip
_MARGIN = 0.99  # a tile must beat the composition by more than the noise of the timing
_CALLS, _REPEATS, _ROTATED_BYTES, _EPS = 12, 15, 256 << 20, 1e-5
_HEAD_DIM = 64  # of a rotation that is measured: other widths take as long


def candidates(variant: str, rows: int, k: int) -> Iterator[Tile]:
    """The tiles worth trying for a variant at a row class, for K inputs."""
    gated, least = "gated" in variant, 2 if "rope" in variant else 1  # outputs of a program: partners stay together
    if rows <= 4:
        for block_n, block_k, warps in (
            (1, 2048, 4), (2, 1024, 4), (2, 2048, 4), (4, 512, 4), (4, 1024, 4), (4, 2048, 8), (8, 256, 4), (8, 512, 4), (8, 1024, 8),
            (16, 512, 8),
        ):  # fmt: skip
            if least <= block_n and block_n * block_k * rows * (1 + gated) <= 32768 and block_k <= 2 * k:
                yield Tile("vector", block_n, block_k, 1, warps, 1)
    for block_n, block_k, slices, warps, stages in (
        (64, 64, 1, 4, 6), (64, 128, 1, 4, 4), (64, 256, 1, 4, 3), (32, 128, 1, 4, 5), (16, 256, 1, 4, 4), (128, 64, 1, 8, 5),
        (16, 64, 4, 4, 4), (16, 128, 4, 4, 3), (32, 64, 4, 4, 4), (32, 128, 4, 4, 3), (16, 64, 8, 8, 4), (32, 64, 8, 8, 3),
    ):  # fmt: skip
        block_m = max(16, rows)
        weights = block_n * (1 + gated)
        if (
            (weights + block_m) * block_k * slices * 2 * stages <= 220 << 10
            and block_k * slices <= 2 * k
            and weights * block_m * slices <= 16384
        ):
            yield Tile("matrix", block_n, block_k, slices, warps, stages)
    if variant in ("plain", "residual", "rope"):
        for block_n, block_k, stages in ((64, 64, 5), (64, 128, 3), (32, 128, 4)):
            for splits in (2, 4, 8):
                if splits * block_k * 2 <= k:
                    yield Tile("matrix", block_n, block_k, 1, 4, stages, splits)


def _graph(calls: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    calls[0]()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _time_us(graphs: dict[Any, torch.cuda.CUDAGraph]) -> dict[Any, float]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples: dict[Any, list[float]] = {name: [] for name in graphs}
    for repeat in range(_REPEATS + 2):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repeat >= 2:
                samples[name].append(begin.elapsed_time(end) * 1e3 / _CALLS)
    return {name: statistics.median(values) for name, values in samples.items()}


class _Case:
    """One variant of one shape at one row class: tensors, the fused launch and the compositions it has to beat."""

    def __init__(
        self, variant: str, rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, rotated_bytes: int,
        without_norm: Tile | None = None,
    ) -> None:  # fmt: skip
        """without_norm: the tile with which the rest is fused where the norm is a kernel of its own."""
        self.variant, self.rows, self.n, self.k, self.without_norm = variant, rows, n, k, without_norm
        self.gated, self.rotated_heads = "gated" in variant, "rope" in variant
        copies = min(_CALLS, max(1, -(-rotated_bytes // (n * k * dtype.itemsize))))
        self.weights = [torch.randn(n, k, device=device, dtype=dtype) * k**-0.5 for _ in range(copies)]
        self.x = torch.randn(rows, k, device=device, dtype=dtype)
        self.norm = torch.rand(k, device=device, dtype=dtype) + 0.5 if "norm" in variant else None
        self.residual = torch.randn(rows, n, device=device, dtype=dtype) if variant == "residual" else None
        self.numbers = torch.arange(rows, device=device)  # positions and slots
        self.angles = torch.randn(rows, _HEAD_DIM, device=device)
        kv_heads = max(1, n // _HEAD_DIM // 6)
        self.heads = n // _HEAD_DIM - 2 * kv_heads, kv_heads, kv_heads
        self.caches = self.empty()[1:]

    def empty(self) -> list[torch.Tensor]:
        """The output, or with a rotation q and caches of one slot a row."""
        shapes: list[tuple[int, ...]] = [(self.rows, self.n // 2 if self.gated else self.n)]
        if self.rotated_heads:
            q, k, v = self.heads
            shapes = [(self.rows, q, _HEAD_DIM), (self.rows, 1, k, _HEAD_DIM), (self.rows, 1, v, _HEAD_DIM)]
        return [torch.full(shape, float("nan"), device=self.x.device, dtype=self.x.dtype) for shape in shapes]

    def fused(self, y: list[torch.Tensor], weight: torch.Tensor, tile: Tile) -> None:
        if self.rotated_heads:
            self._rotated(y, weight, self.x, self.norm, tile)
        else:
            launch(self.x, weight, None, self.norm, self.residual, self.gated, _EPS, y[0], tile)

    def _rotated(self, y: list[torch.Tensor], weight: torch.Tensor, x: torch.Tensor, norm: torch.Tensor | None, tile: Tile) -> None:
        q, k_cache, v_cache = y
        launch_qkv(x, weight, None, norm, _EPS, self.numbers, self.angles, k_cache, v_cache, self.numbers, False, q, tile)

    def norm_apart(self, y: list[torch.Tensor], weight: torch.Tensor, tile: Tile) -> None:
        """The norm, then a rotated projection in the tile that was the best for it."""
        assert self.norm is not None
        self._rotated(y, weight, rms_norm(self.x, self.norm, _EPS), None, tile)

    def composed(self, weight: torch.Tensor) -> list[torch.Tensor]:
        if self.rotated_heads:
            y = linear(self.x, weight, norm_weight=self.norm, eps=_EPS).view(self.rows, -1, _HEAD_DIM)
            (q, k, v), (k_cache, v_cache) = y.split(self.heads, 1), self.caches
            return [rope_and_cache(q, k, v, self.numbers, self.angles, k_cache, v_cache, self.numbers), k_cache, v_cache]
        return [self._projected(weight)]

    def _projected(self, weight: torch.Tensor) -> torch.Tensor:
        x = self.x if self.norm is None else rms_norm(self.x, self.norm, _EPS)
        if self.residual is not None:
            return torch.addmm(self.residual, x, weight.t())
        y = F.linear(x, weight)
        return silu_and_mul(y) if self.gated else y

    def exact(self) -> list[torch.Tensor]:
        norm, residual = (None if t is None else t.double() for t in (self.norm, self.residual))
        x, weight = self.x.double(), self.weights[0].double()
        if self.rotated_heads:
            k_cache, v_cache = (cache.double() for cache in self.caches)
            q = linear_rope_and_cache_ref(x, weight, None, norm, self.numbers, self.angles, k_cache, v_cache, self.numbers, eps=_EPS)
            return [q, k_cache, v_cache]
        return [linear_ref(x, weight, None, norm, residual, self.gated, _EPS)]

    def rotated(self) -> list[torch.Tensor]:
        return (self.weights * _CALLS)[:_CALLS]


def _error(got: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Of all outputs together, relative; NaN where one was not written."""
    distance, size = (
        torch.stack([x.norm() for x in xs]).norm() for xs in ([g.double() - e for g, e in zip(got, exact, strict=True)], exact)
    )
    return float(distance / size)


def _measure(case: _Case) -> dict[str, Any]:
    exact = case.exact()
    allowed = 2 * _error(case.composed(case.weights[0]), exact)
    graphs: dict[Any, torch.cuda.CUDAGraph] = {}
    refused, outputs = [], []  # outputs: the graphs write into them
    for tile in candidates(case.variant, case.rows, case.k):
        y = case.empty()
        outputs.append(y)
        try:
            case.fused(y, case.weights[0], tile)
        except Exception as error:  # the compiler may refuse a tile for this device; it is listed, not hidden
            refused.append({"tile": vars(tile), "error": str(error)[:120]})
            continue
        if not _error(y, exact) <= allowed:
            refused.append({"tile": vars(tile), "error": "wrong result"})
            continue
        graphs[tile] = _graph([partial(case.fused, y, weight, tile) for weight in case.rotated()])
    graphs["composed"] = _graph([partial(case.composed, weight) for weight in case.rotated()])
    if case.without_norm is not None:
        outputs.append(case.empty())
        graphs["norm apart"] = _graph([partial(case.norm_apart, outputs[-1], weight, case.without_norm) for weight in case.rotated()])
    times = _time_us(graphs)
    composed = times.pop("composed")
    composed = min(composed, times.pop("norm apart", composed))
    best = min(times, key=times.__getitem__, default=None)  # none: too few inputs for any tile, or all were refused
    us = float("inf") if best is None else times[best]
    return {
        "variant": case.variant,
        "rows": case.rows,
        "n": case.n,
        "k": case.k,
        "us": us,
        "composed_us": composed,
        "tile": None if best is None else vars(best),
        "refused": refused,
        "tb_per_s": case.n * case.k * case.x.dtype.itemsize / us / 1e6,
    }


def _compile_ahead(shapes: list[Shape], dtype: torch.dtype, device: torch.device) -> None:
    """Compile all tiles in parallel; the sweep would otherwise wait for the compiler one kernel at a time."""
    jobs = {
        (variant, rows, k, tile): n
        for n, k, place in shapes
        for variant in VARIANTS[place]
        for rows in ROW_CLASSES
        for tile in candidates(variant, rows, k)
    }

    def one(job: tuple[tuple[str, int, int, Tile], int]) -> None:
        (variant, rows, k, tile), _ = job
        torch.cuda.set_device(device)
        case = _Case(variant, rows, 256, k, dtype, device, 0)
        with suppress(Exception):  # said by _measure, with the error
            case.fused(case.empty(), case.weights[0], tile)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, jobs.items()))


def _key(entry: dict[str, Any]) -> tuple[int, int, str, int]:
    return entry["k"], entry["n"], entry["variant"], entry["rows"]


def _line(row: dict[str, Any]) -> str:
    tile = row["tile"]
    size = f"{row['variant']:10} {row['rows']:3} x {row['n']:6} x {row['k']:5}"
    if tile is None:
        return f"{size}  no tile runs, composed {row['composed_us']:7.2f} us, {len(row['refused'])} refused"
    blocks = "x".join(str(tile[name]) for name in ("block_n", "block_k", "slices", "splits"))
    how = f"{tile['kind']} {blocks} warps {tile['num_warps']} stages {tile['num_stages']}"
    speed = f"{row['us']:7.2f} us {row['tb_per_s']:5.2f} TB/s, composed {row['composed_us']:7.2f} us"
    return f"{size}  {speed}  {how}, {len(row['refused'])} refused"


def tune(shapes: list[Shape], *, dtype: torch.dtype = torch.bfloat16, out: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Measure ``shapes`` and put them into the table of this device's architecture; other shapes keep their entries. Returns its path.

    Raises RuntimeError without a GPU, and while a CUDA graph is being captured.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tune measures a GPU and none is visible; the shipped tables are used as they are")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tune cannot run while a CUDA graph is being captured: call it before the capture")
    device = torch.device("cuda", torch.cuda.current_device())
    target = target_of(device)
    _compile_ahead(shapes, dtype, device)
    path = out or Path(__file__).parent / "tables" / f"linear_{target.arch}.json"
    shipped = Path(__file__).parent / "tables" / f"linear_{target.arch}.json"
    entries = {_key(entry): entry for entry in json.loads(shipped.read_text())["entries"]} if shipped.exists() else {}
    header = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "dtype": str(dtype).removeprefix("torch.")}
    for n, k, place in shapes:
        for variant in VARIANTS[place]:
            if "rope" in variant and (n % _HEAD_DIM or n < 3 * _HEAD_DIM):  # no heads of that width
                continue
            for rows in ROW_CLASSES:
                rotated = entries.get((k, n, "rope", rows), {}).get("tile") if variant == "norm+rope" else None
                without_norm = Tile(**rotated) if rotated else None
                row = _measure(_Case(variant, rows, n, k, dtype, device, _ROTATED_BYTES, without_norm))
                say(_line(row))
                entries.pop(_key(row), None)
                faster = row["us"] < _MARGIN * row["composed_us"]
                if faster or "rope" in variant or variant == "residual":  # without an entry they take the tile of the projection alone
                    entry = {name: row[name] for name in ("variant", "rows", "n", "k", "us", "composed_us", "tile")}
                    entries[_key(row)] = entry if faster else {**entry, "us": None, "tile": None}
        torch.cuda.empty_cache()
        path.write_text(json.dumps({**header, "entries": sorted(entries.values(), key=_key)}, indent=1) + "\n")  # after each shape
    return path
