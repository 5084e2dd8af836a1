"""Makes the table of few-row linear layers for the device at hand: ``python -m tkernels tune``.

For every shape and row class each tile is checked against fp64, then timed next to cuBLAS inside one CUDA graph over weights
rotated past L2; the variants take turns and the median counts. A tile enters the table only where it is faster than cuBLAS.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tkernels._target import target_of
from tkernels.linear import ROW_CLASSES, Tile, launch

Shape = tuple[int, int]  # (out_features, in_features)
SHAPES: dict[str, list[Shape]] = {
    "Llama 1B": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)],
    "Llama 8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "SmolLM2 135M": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
}
_MARGIN = 0.99  # a tile must beat cuBLAS by more than the noise of the timing
_CALLS, _REPEATS, _ROTATED_BYTES = 12, 15, 256 << 20


def candidates(rows: int, k: int) -> Iterator[Tile]:
    """The tiles worth trying at a row class, for K inputs."""
    if rows <= 4:
        for block_n, block_k, warps in ((4, 512, 4), (4, 1024, 4), (8, 512, 4), (4, 2048, 8), (8, 1024, 8), (16, 512, 8), (2, 2048, 4)):
            if block_n * block_k * rows <= 32768 and block_k <= 2 * k:
                yield Tile("vector", block_n, block_k, 1, warps, 1)
    for block_n, block_k, slices, warps, stages in (
        (64, 64, 1, 4, 6), (64, 128, 1, 4, 4), (64, 256, 1, 4, 3), (32, 128, 1, 4, 5), (16, 256, 1, 4, 4), (128, 64, 1, 8, 5),
        (16, 64, 4, 4, 4), (16, 128, 4, 4, 3), (32, 64, 4, 4, 4), (32, 128, 4, 4, 3), (16, 64, 8, 8, 4), (32, 64, 8, 8, 3),
    ):  # fmt: skip
        block_m = max(16, rows)
        if (
            (block_n + block_m) * block_k * slices * 2 * stages <= 220 << 10
            and block_k * slices <= 2 * k
            and block_n * block_m * slices <= 16384
        ):
            yield Tile("matrix", block_n, block_k, slices, warps, stages)


def _graph(calls: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    for call in calls[:1]:
        call()
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


def _measure(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    copies = min(_CALLS, max(2, -(-_ROTATED_BYTES // (n * k * dtype.itemsize))))
    weights = [torch.randn(n, k, device=device, dtype=dtype) * k**-0.5 for _ in range(copies)]
    x = torch.randn(rows, k, device=device, dtype=dtype)
    exact = F.linear(x.double(), weights[0].double())
    allowed = 2 * float((F.linear(x, weights[0]).double() - exact).norm() / exact.norm())
    graphs: dict[Any, torch.cuda.CUDAGraph] = {}
    refused = []
    outs: list[torch.Tensor] = []
    for tile in candidates(rows, k):
        y = torch.full((rows, n), float("nan"), device=device, dtype=dtype)
        try:
            launch(x, weights[0], None, y, tile)
        except Exception as error:  # the compiler may refuse a tile for this device; it is listed, not hidden
            refused.append({"tile": vars(tile), "error": str(error)[:120]})
            continue
        if not float((y.double() - exact).norm() / exact.norm()) <= allowed:
            refused.append({"tile": vars(tile), "error": "wrong result"})
            continue
        outs.append(y)
        graphs[tile] = _graph([lambda w=w, y=y, tile=tile: launch(x, w, None, y, tile) for w in (weights * _CALLS)[:_CALLS]])
    graphs["cublas"] = _graph([lambda w=w: F.linear(x, w) for w in (weights * _CALLS)[:_CALLS]])
    times = _time_us(graphs)
    cublas = times.pop("cublas")
    best = min(times, key=times.__getitem__)
    return {
        "rows": rows, "n": n, "k": k, "us": times[best], "cublas_us": cublas, "tile": vars(best), "refused": refused,
        "tb_per_s": n * k * dtype.itemsize / times[best] / 1e6,
    }  # fmt: skip


def _compile_ahead(shapes: list[Shape], dtype: torch.dtype, device: torch.device) -> None:
    """Compile all tiles in parallel; the sweep would otherwise wait for the compiler one kernel at a time."""

    def one(job: tuple[int, int, int, Tile]) -> None:
        rows, n, k, tile = job
        torch.cuda.set_device(device)
        x = torch.zeros(rows, k, device=device, dtype=dtype)
        try:
            launch(
                x,
                torch.zeros(min(n, 2 * tile.block_n), k, device=device, dtype=dtype),
                None,
                torch.empty(rows, min(n, 2 * tile.block_n), device=device, dtype=dtype),
                tile,
            )
        except Exception:
            return  # said by _measure, with the error

    jobs = {(rows, k, tile): (rows, n, k, tile) for n, k in shapes for rows in ROW_CLASSES for tile in candidates(rows, k)}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, jobs.values()))


def _line(row: dict[str, Any]) -> str:
    tile = row["tile"]
    how = f"{tile['kind']} {tile['block_n']}x{tile['block_k']}x{tile['slices']} warps {tile['num_warps']} stages {tile['num_stages']}"
    speed = f"{row['us']:7.2f} us {row['tb_per_s']:5.2f} TB/s, cuBLAS {row['cublas_us']:7.2f} us"
    return f"{row['rows']:3} x {row['n']:6} x {row['k']:5}  {speed}  {how}, {len(row['refused'])} refused"


def tune(shapes: list[Shape], *, dtype: torch.dtype = torch.bfloat16, out: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Measure ``shapes`` and write the table of this device's architecture. Returns its path.

    Raises RuntimeError without a GPU, and while a CUDA graph is being captured.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tune measures a GPU and none is visible; the shipped tables are used as they are")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tune cannot run while a CUDA graph is being captured: call it before the capture")
    device = torch.device("cuda", torch.cuda.current_device())
    target = target_of(device)
    _compile_ahead(shapes, dtype, device)
    rows_measured = []
    for n, k in shapes:
        for rows in ROW_CLASSES:
            row = _measure(rows, n, k, dtype, device)
            rows_measured.append(row)
            say(_line(row))
        torch.cuda.empty_cache()
    path = out or Path(__file__).parent / "tables" / f"linear_{target.arch}.json"
    header = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "dtype": str(dtype).removeprefix("torch.")}
    won = [
        {key: row[key] for key in ("rows", "n", "k", "us", "cublas_us", "tile")}
        for row in rows_measured
        if row["us"] < _MARGIN * row["cublas_us"]
    ]
    path.write_text(
        json.dumps(
            {**header, "entries": won, "lost": [[r["rows"], r["n"], r["k"]] for r in rows_measured if r["us"] >= _MARGIN * r["cublas_us"]]},
            indent=1,
        )
        + "\n"
    )
    return path
