"""All linears of a Llama-1B-shaped stack, back to back in one CUDA graph, beside cuBLAS.

    python -m bench.linear_stack --out bench/results/linear_stack_h200.json

What a decode step does without attention and sampling: in each layer q, k and v with the norm, the rotation and the cache write, o with
the residual, gate and up with the norm and silu, down with the residual; then the head with the norm. Every layer has weights of its
own, 2.5 GB in all, so all come from memory. Ours with plain and with dependent launches; beside it F.linear on the same matrices, and
nothing else, with inputs that lie there already. Correctness first: every projection of a layer and the head against fp64, no further
from it than twice what torch's single ops are; and all graphs of ours give the same bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import tkernels
from bench.harness import graph_of, interleaved_samples_us, relative_error, write_results
from bench.shapes import LLAMA_1B, TINY
from tkernels import _dependent
from tkernels.linear import linear_ref
from tkernels.qkv import linear_rope_and_cache_ref

EPS = 1e-5
BARS_US = {1: 660.0, 8: 700.0, 16: 700.0}  # what the stack may take, by rows
_REPLAYS = 3  # timed together, behind one more that keeps the device busy while they are launched


class Layer:
    def __init__(self, shape: dict[str, Any], rows: int, draw: Callable[..., torch.Tensor]) -> None:
        hidden, feed, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        self.qkv, self.o = draw((heads + 2 * kv_heads) * dim, hidden), draw(hidden, heads * dim)
        self.gate_up, self.down = draw(2 * feed, hidden), draw(hidden, feed)
        self.norms = [1 + 0.1 * draw(hidden), 1 + 0.1 * draw(hidden)]
        self.caches = [draw(rows, 1, kv_heads, dim) for _ in "kv"]  # a page of one slot for each row


class Stack:
    """The weights, and one pass of ``rows`` tokens through all of them."""

    def __init__(self, shape: dict[str, Any], rows: int, device: str, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def draw(*size: int) -> torch.Tensor:
            scale = size[1] ** -0.5 if len(size) == 2 else 1.0
            return torch.randn(*size, device=device, dtype=dtype, generator=generator) * scale

        self.layers = [Layer(shape, rows, draw) for _ in range(shape["num_hidden_layers"])]
        self.head, self.norm = draw(shape["vocab_size"], shape["hidden_size"]), 1 + 0.1 * draw(shape["hidden_size"])
        self.x = torch.randn(rows, shape["hidden_size"], device=device, dtype=dtype, generator=generator)
        self.fed = torch.randn(rows, shape["intermediate_size"], device=device, dtype=dtype, generator=generator)
        self.numbers = torch.arange(rows, device=device)  # positions and slots
        self.angles = torch.randn(rows, shape["head_dim"], device=device, generator=generator)
        self.y = torch.empty(0)

    def weight_bytes(self) -> int:
        matrices = [weight for layer in self.layers for weight in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return sum(weight.nbytes for weight in (*matrices, self.head))

    def ours(self) -> None:
        h = self.x
        for layer in self.layers:
            q = tkernels.linear_rope_and_cache(
                h, layer.qkv, None, layer.norms[0], self.numbers, self.angles, *layer.caches, self.numbers, eps=EPS
            )
            h = tkernels.linear(q.flatten(1), layer.o, residual=h)
            fed = tkernels.linear(h, layer.gate_up, norm_weight=layer.norms[1], gated=True, eps=EPS)
            h = tkernels.linear(fed, layer.down, residual=h)
        self.y = tkernels.linear(h, self.head, norm_weight=self.norm, eps=EPS)

    def matrices(self) -> None:
        for layer in self.layers:
            F.linear(self.x, layer.qkv)
            F.linear(self.x, layer.o)
            F.linear(self.x, layer.gate_up)
            F.linear(self.fed, layer.down)
        F.linear(self.x, self.head)

    def check(self) -> dict[str, tuple[float, float]]:
        """Relative errors against fp64 of each projection of a layer and the head: ours, and torch's single ops'."""
        layer, x, residual = self.layers[-1], self.x, self.x.flip(-1).contiguous()

        def qkv(op: Callable[..., torch.Tensor], wide: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> torch.Tensor:
            caches = [wide(torch.zeros_like(cache)) for cache in layer.caches]
            tokens = (self.numbers, self.angles, *caches, self.numbers)
            q = op(wide(x), wide(layer.qkv), None, wide(layer.norms[0]), *tokens, eps=EPS)
            return torch.cat([part.flatten(1) for part in (q, *caches)], 1)

        found = {"qkv": self._errors("qkv", qkv(tkernels.linear_rope_and_cache), qkv(linear_rope_and_cache_ref), qkv(
            linear_rope_and_cache_ref, torch.Tensor.double
        ))}  # fmt: skip
        for name, inputs, weight, more in (
            ("o", x, layer.o, {"residual": residual}),
            ("gate_up", x, layer.gate_up, {"norm_weight": layer.norms[1], "gated": True}),
            ("down", self.fed, layer.down, {"residual": residual}),
            ("head", x, self.head, {"norm_weight": self.norm}),
        ):
            wide = {key: value.double() if isinstance(value, torch.Tensor) else value for key, value in more.items()}
            ours, theirs = tkernels.linear(inputs, weight, **more, eps=EPS), linear_ref(inputs, weight, **more, eps=EPS)
            found[name] = self._errors(name, ours, theirs, linear_ref(inputs.double(), weight.double(), **wide, eps=EPS))
        return found

    def _errors(self, name: str, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
        errors = relative_error(ours, exact), relative_error(theirs, exact)
        if not errors[0] <= 2 * errors[1] + 1e-6:
            raise SystemExit(
                f"{name} of {len(self.x)} rows: relative error {errors[0]:.2e}, torch's ops {errors[1]:.2e}: not timing a wrong answer"
            )
        return errors


def captured(stack: Stack, dependent: bool) -> tuple[Callable[[], Any], torch.Tensor]:
    """A replay of our stack, and where it leaves the logits."""
    with _dependent.captures(dependent):
        run = graph_of([stack.ours])
    return run, stack.y


def check_bits(runs: list[tuple[Callable[[], Any], torch.Tensor]]) -> None:
    outs = []
    for run, y in runs:
        if y.is_cuda:
            y.fill_(float("nan"))
        run()
        outs.append(y.clone())
    if not all(torch.equal(out, outs[0]) for out in outs) or outs[0].isnan().any():
        raise SystemExit("graphs with plain and with dependent launches differ: not timing a wrong answer")


def _replay_us(run: Callable[[], Any]) -> float:
    if not torch.cuda.is_available():
        return interleaved_samples_us({"run": run}, repeats=1, warmup=0)["run"][0]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    begin.record()
    for _ in range(_REPLAYS):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / _REPLAYS


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--small", action="store_true", help="a tiny stack, to try the script without a GPU")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, dtype = (TINY if options.small else LLAMA_1B), (torch.bfloat16 if device == "cuda" else torch.float32)
    table: list[dict[str, Any]] = []
    errors: dict[str, Any] = {}
    for rows in options.rows:
        stack = Stack(shape, rows, device, dtype)
        errors[str(rows)] = stack.check()
        plain, dependent = captured(stack, False), captured(stack, True)
        check_bits([plain, dependent])
        runs = {"ours, dependent": dependent[0], "ours": plain[0], "cuBLAS, the matrices only": graph_of([stack.matrices])}
        samples = interleaved_samples_us(runs, repeats=options.repeats, once_us=_replay_us)
        us = {name: sorted(times)[len(times) // 2] for name, times in samples.items()}
        table.append({
            "rows": rows,
            **{f"{name}, µs": value for name, value in us.items()},
            "bar, µs": BARS_US.get(rows),
            **{f"{name}, TB/s": stack.weight_bytes() / value / 1e6 for name, value in us.items()},
        })  # fmt: skip
        print(", ".join(f"{key} {value}" for key, value in table[-1].items()), flush=True)
        if options.out:  # after each size: a run that is cut short keeps what it has
            facts = {"shape": "tiny" if options.small else "Llama-1B", "weight_bytes": stack.weight_bytes(), "errors": errors}
            write_results(options.out, "python -m bench.linear_stack", table, unit="Units stand in the header", **facts)
        del stack, plain, dependent, runs


if __name__ == "__main__":
    main()
