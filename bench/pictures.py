"""Pictures of results files: a roofline per suite and GPU, and the modes per batch size with what the runtime picks."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from bench.results_files import Run, newest

OURS = "tkernels"


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def pictures(found: list[Run]) -> dict[str, tuple[str, Any]]:
    """File name → (kind, its data): a roofline per suite and GPU, and the modes per batch size."""
    wanted: dict[str, tuple[str, Any]] = {}
    names = {(row.suite, row.name) for run in found for row in run.rows}
    for suite in sorted({suite for suite, _ in names}):
        points: dict[str, list[dict[str, Any]]] = {}
        for _, name in sorted(pair for pair in names if pair[0] == suite):
            for gpu, (_, rows) in newest(found, name).items():
                points.setdefault(gpu, []).extend(
                    {"name": name, "case": row.case, "peer": row.peer, **{key: row.info.get(key) for key in _POINT}}
                    for row in rows
                    if "roof" in row.info
                )
        for gpu, data in points.items():
            if data:
                wanted[f"roofline_{suite}_{_slug(gpu)}.svg"] = ("roofline", {"suite": suite, "gpu": gpu, "points": data})
    for gpu, (_, rows) in newest(found, "decode_step").items():
        data = [{"case": row.case, "peer": row.peer, "ms": row.us / 1e3, "picks": row.info.get("picks", {})} for row in rows]
        wanted[f"modes_{_slug(gpu)}.svg"] = ("modes", {"gpu": gpu, "points": data})
    return wanted


_POINT = ("bytes", "flops", "gb_per_s", "tflop_per_s", "roof")


def draw(kind: str, data: Any, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tkernels"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    if kind == "modes":
        _draw_modes(axes, data)
    else:
        _draw_roofline(axes, data)
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Description": digest(data)})
    plt.close(figure)


def _draw_roofline(axes: Any, data: Any) -> None:
    """GB/s over bytes moved, or TFLOP/s over FLOP per byte where the problems have operations."""
    points = data["points"]
    roof = points[0]["roof"]
    by_intensity = all(point["flops"] for point in points)
    for peer in dict.fromkeys(point["peer"] for point in points):
        mine = [point for point in points if point["peer"] == peer]
        xs = [point["flops"] / point["bytes"] if by_intensity else point["bytes"] for point in mine]
        ys = [point["tflop_per_s"] if by_intensity else point["gb_per_s"] for point in mine]
        axes.plot(xs, ys, "o" if peer == OURS else ".", label=peer, alpha=0.8)
    if by_intensity:
        xs = sorted(point["flops"] / point["bytes"] for point in points)
        ridge = roof["tflop_per_s"] * 1e3 / roof["gb_per_s"]
        line = [xs[0], ridge, max(xs[-1], ridge * 2)]
        axes.plot(line, [min(x * roof["gb_per_s"] / 1e3, roof["tflop_per_s"]) for x in line], "k-", linewidth=1, label="measured roof")
        axes.set_xlabel("FLOP per byte")
        axes.set_ylabel("TFLOP/s")
    else:
        axes.axhline(roof["gb_per_s"], color="k", linewidth=1, label="measured roof (copy)")
        axes.set_xlabel("bytes moved")
        axes.set_ylabel("GB/s")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"{data['suite']}, {data['gpu']}")


def _draw_modes(axes: Any, data: Any) -> None:
    points = data["points"]
    for peer in dict.fromkeys(point["peer"] for point in points):
        mine = sorted(
            (int(re.sub(r"\D", "", point["case"])), point["ms"], point["picks"].get(peer)) for point in points if point["peer"] == peer
        )
        axes.plot([size for size, _, _ in mine], [ms for _, ms, _ in mine], ".-", label=peer, linewidth=1)
        if " auto" in peer:
            for size, ms, pick in mine:
                axes.annotate(str(pick), (size, ms), fontsize=6, xytext=(2, -8), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("batch (sequences in a decode step)")
    axes.set_ylabel("ms per step")
    axes.set_title(f"Modes per batch size, and what auto picks, {data['gpu']}")
