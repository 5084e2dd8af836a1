"""Makes the table of few-row linear layers for the device at hand: ``python -m tkernels tune``.

For every shape, fusion and row class each tile that may pay (``_candidates``) is checked against fp64, then timed next to the
composition (cuBLAS and the single ops) inside one CUDA graph over weights rotated past L2; the variants take turns and the median counts.
A tile enters the table only where it is faster than the composition, with a norm also than the norm alone before what is fused without
it. With a rotation the composition is ``linear`` and ``rope_and_cache``, and where that wins the table says so too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tkernels import _repeats
from tkernels._candidates import candidates
from tkernels._linear_kernels import ROW_CLASSES, Tile
from tkernels._linear_tma import absence
from tkernels._target import Target, target_of
from tkernels._tune_case import HEAD_DIM, Case, Job, compile_ahead, error, time_us
from tkernels.linear import table_of

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


def _jobs(shapes: list[Shape], rows: Sequence[int], target: Target) -> list[Job]:
    """What is measured, in order: variant, rows, n, k and a tile, or None for the composition."""
    tma = absence(target.arch) is None
    return [
        (variant, size, n, k, tile)
        for n, k, place in shapes
        for variant in VARIANTS[place]
        if "rope" not in variant or (n % HEAD_DIM == 0 and n >= 3 * HEAD_DIM)  # else there are no heads of that width
        for size in rows
        for tile in (*candidates(variant, size, n, k, target.num_sms, tma), None)
    ]


def _measure(case: Case, tiles: list[Tile]) -> dict[str, Any]:
    exact = case.exact()
    allowed = 2 * error(case.composed(case.weights[0]), exact)
    runs: dict[Any, Callable[[], None]] = {}
    refused, outputs = [], []  # outputs: the graphs write into them
    for tile in tiles:
        y = case.empty()
        outputs.append(y)
        try:
            case.fused(y, case.weights[0], tile)
        except Exception as failure:  # the compiler may refuse a tile for this device; it is listed, not hidden
            refused.append({"tile": vars(tile), "error": str(failure)[:120]})
            continue
        if not error(y, exact) <= allowed:
            refused.append({"tile": vars(tile), "error": "wrong result"})
            continue
        runs[tile] = case.run(partial(case.fused, y, tile=tile))
    runs["composed"] = case.run(case.composed)
    if case.without_norm is not None:
        y = case.empty()
        outputs.append(y)
        runs["norm apart"] = case.run(partial(case.norm_apart, y, tile=case.without_norm))
    times = time_us(runs, case.calls)
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


def tune(
    shapes: list[Shape],
    *,
    rows: Sequence[int] = ROW_CLASSES,
    dtype: torch.dtype = torch.bfloat16,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Measure ``shapes`` and put them into the table of this device's architecture; other shapes and rows keep their entries.

    out: another file, added to if it is there, else a copy. It is written after every entry, and this process uses each from then on.
    rows: of ``ROW_CLASSES``. Returns the table's path.
    Raises RuntimeError without a GPU, and while a CUDA graph is being captured; ValueError for rows that are no class.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tune measures a GPU and none is visible; the shipped tables are used as they are")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tune cannot run while a CUDA graph is being captured: call it before the capture")
    if not set(rows) <= set(ROW_CLASSES):
        raise ValueError(f"rows: expected some of {ROW_CLASSES}, got {list(rows)}")
    device = torch.device("cuda", torch.cuda.current_device())
    target = target_of(device)
    jobs = _jobs(shapes, rows, target)
    path = out or _table_path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    compiled, refused = compile_ahead(jobs, dtype, device)
    say(f"{compiled} kernels compiled, {refused} of them refused")
    header = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "dtype": str(dtype).removeprefix("torch.")}
    _fill(jobs, dtype, device, target, path, header, say)
    return path


def _table_path(target: Target) -> Path:
    return Path(__file__).parent / "tables" / f"linear_{target.arch}.json"


def _fill(
    jobs: list[Job], dtype: torch.dtype, device: torch.device, target: Target, path: Path, header: dict[str, Any],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Measure ``jobs`` and put what they give into the table at ``path``, which is a copy of the shipped one where there is none."""
    before = path if path.exists() else _table_path(target)
    entries = {_key(entry): entry for entry in json.loads(before.read_text())["entries"]} if before.exists() else {}
    table = table_of(target.arch)
    table |= {(e["variant"], e["rows"], e["n"], e["k"]): Tile(**e["tile"]) if e["tile"] else None for e in entries.values()}
    tiles: dict[tuple[str, int, int, int], list[Tile]] = {}
    for variant, rows, n, k, tile in jobs:
        tiles.setdefault((variant, rows, n, k), []).extend([] if tile is None else [tile])
    for (variant, rows, n, k), tried in tiles.items():
        without_norm = "plain" if variant == "norm" else variant.removeprefix("norm+")
        apart = table.get((without_norm, rows, n, k)) if "norm" in variant else None
        row = _measure(Case(variant, rows, n, k, dtype, device, without_norm=apart), tried)
        say(_line(row))
        entries.pop(_key(row), None)
        table.pop((variant, rows, n, k), None)
        faster = row["us"] < _MARGIN * row["composed_us"]
        if faster or "rope" in variant or variant == "residual":  # without an entry they take the tile of the projection alone
            entry = {name: row[name] for name in ("variant", "rows", "n", "k", "us", "composed_us", "tile")}
            entries[_key(row)] = entry if faster else {**entry, "us": None, "tile": None}
            table[(variant, rows, n, k)] = Tile(**row["tile"]) if faster else None
        _repeats.forget()  # what a call launched is not what it launches now
        part = path.with_name(path.name + ".part")  # whoever is broken off leaves a whole table
        part.write_text(json.dumps({**header, "entries": sorted(entries.values(), key=_key)}, indent=1) + "\n")
        part.replace(path)
