"""``python -m tkernels info`` and ``python -m tkernels tune``."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

from tkernels import _dependent
from tkernels import tune as tuning
from tkernels._linear_kernels import ROW_CLASSES
from tkernels._target import target_of
from tkernels._triton import HAVE_TRITON, INTERPRETED, triton
from tkernels.attention import decode_sm90, prefill_sm90

_WITHOUT = {"attention": "a heuristic chooses", "linear": "torch computes"}  # table → what there is without it


def info() -> None:
    """Print the device, the versions, the ops and which tables apply."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = target_of(device)
    version = f"{triton.__version__}{' (interpreted)' if INTERPRETED else ''}" if HAVE_TRITON else "not installed"
    if device.type == "cuda":
        print(f"device  {torch.cuda.get_device_name()} ({target.arch}, {target.num_sms} multiprocessors)")
    else:
        print(f"device  CPU ({target.arch}, {torch.get_num_threads()} threads)")
    print(f"torch   {torch.__version__}")
    print(f"triton  {version}")
    runs = (
        "Triton kernels" if device.type == "cuda" or INTERPRETED else "PyTorch references (set TRITON_INTERPRET=1 to interpret the kernels)"
    )
    print(f"ops run {runs}")
    print(f"ops     {', '.join(sorted(_ops()))}")
    for name, kernel in (("prefill", prefill_sm90), ("decode", decode_sm90)):
        absent = kernel.absence(target.arch)
        print(f"gluon   {name} kernel {f'not in use: {absent}' if absent else 'in use where it applies'}")
    print(f"pdl     dependent launch of captured kernels: {_dependent.state(target.arch)}")
    for name, archs in _tables().items():
        others = ", ".join(f"{arch} ({count} entries)" for arch, count in archs.items() if arch != target.arch)
        if target.arch in archs:
            print(f"table   {name}: {archs[target.arch]} entries for {target.arch}, in use")
        else:
            print(f"table   {name}: none for {target.arch}: {_WITHOUT[name]}; there are: {others}")


def _ops() -> list[str]:
    """Names of the registered ops."""
    names = torch._C._dispatch_get_all_op_names()
    return [name.removeprefix("tkernels::") for name in names if name.startswith("tkernels::") and "." not in name]


def _tables() -> dict[str, dict[str, int]]:
    """Table → architecture → entries."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted((Path(__file__).parent / "tables").glob("*.json")):
        data = json.loads(path.read_text())
        if "entries" in data:  # one file per architecture, as `tune` writes them
            name, _, arch = path.stem.partition("_")
            found.setdefault(name, {})[arch] = len(data["entries"])
        else:
            found[path.stem] = {arch: sum(map(len, kernels.values())) for arch, kernels in data.items()}
    return found


def _shape(text: str) -> tuning.Shape:
    size, _, place = text.lower().partition(":")
    n, _, k = size.partition("x")
    if not (n.isdigit() and k.isdigit() and (place or "any") in tuning.VARIANTS):
        raise argparse.ArgumentTypeError(f"expected OUTxIN or OUTxIN:PLACE with a place of {', '.join(tuning.VARIANTS)}, got {text!r}")
    return int(n), int(k), place or "any"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tkernels", description="Facts about this device, and tables for it.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="device, versions, which tables apply")
    tune = commands.add_parser("tune", help="measure the few-row linear layers and write the table of this device")
    tune.add_argument(
        "--shapes",
        type=_shape,
        nargs="+",
        metavar="OUTxIN[:PLACE]",
        help="projections to measure, e.g. 3072x2048:qkv; the default is a list of common models'",
    )
    tune.add_argument("--rows", type=int, nargs="+", default=ROW_CLASSES, choices=ROW_CLASSES, help="row classes to measure; default: all")
    tune.add_argument(
        "--out", type=Path, help="where to write the table, which is added to if it is there; the default is the package's own"
    )
    options = parser.parse_args()
    if options.command == "info":
        info()
        return 0
    shapes = options.shapes or [shape for shapes in tuning.SHAPES.values() for shape in shapes]
    try:
        print(tuning.tune(shapes, rows=options.rows, out=options.out, say=partial(print, flush=True)))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
