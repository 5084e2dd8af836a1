"""Every kernel compiles for a real GPU, on a machine without one, and with sizes of 1.

The interpreter takes all arguments as they are. The compiler makes a constant of an integer argument that is 1, and a constant has no
methods: ``n.to(tl.int64)`` compiles for every n but that one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tkernels._triton import HAVE_TRITON


@pytest.mark.skipif(not HAVE_TRITON, reason="needs the compiler")
def test_b066_all_kernels_compile_with_sizes_of_one(tmp_path: Path) -> None:
    launched, _, constants = _in_another_process("sizes of one", tmp_path).partition("|")
    assert set(launched.split()) >= {
        "_vector_kernel", "_matrix_kernel", "_rope_kernel", "_rms_norm_kernel", "_layer_norm_kernel", "_gated_kernel",
        "_quantize_kernel", "runs_kernel", "finish_kernel", "_best_kernel",
        "_adjust_kernel", "_count_kernel", "_parts_kernel", "_finish_kernel",
    }  # fmt: skip
    assert {"n", "k_total", "num_heads", "hidden", "width", "vocab"} <= set(constants.split())


@pytest.mark.skipif(not HAVE_TRITON, reason="needs the compiler")
def test_all_kernels_of_a_projection_sum_in_one_order(tmp_path: Path) -> None:
    """Where Triton orders a sum, by the layout of what it sums, that layout must not depend on what else a kernel loads and stores."""
    orders: dict[str, dict[str, str]] = {}
    for line in _in_another_process("orders", tmp_path).splitlines():
        tile, kernel, order = line.split("|")
        orders.setdefault(tile, {})[kernel] = order
    assert [sorted(kernels) for kernels in orders.values()] == [["argmax", "linear", "rope"]] * 4
    for tile, kernels in orders.items():
        assert "#" in kernels["linear"], f"{tile}: nothing was found in what the compiler gave"
        assert len(set(kernels.values())) == 1, (tile, kernels)


def _in_another_process(what: str, cache: Path) -> str:
    """This one has decorated its kernels for the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, __file__, what], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _compile_at_launch() -> tuple[set[str], set[str], list[str]]:
    """Launches compile for sm_90 instead, specialised as Triton would.

    Returns the kernels, the arguments that became constants, and what the kernels are before they become LLVM's.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    names = {
        torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
    }  # fmt: skip
    kernels: set[str] = set()
    ones: set[str] = set()
    modules: list[str] = []

    def run(self, *args, grid, warmup, num_warps=4, **kwargs):
        bound = dict(zip((p.name for p in self.params), args, strict=False)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.params):
            name, value = parameter.name, bound[parameter.name]
            specialised = not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (specialised and isinstance(value, int) and value == 1):
                signature[name], constants[name] = "constexpr", value
                if not parameter.is_constexpr and value == 1:
                    ones.add(name)
            elif isinstance(value, torch.Tensor):
                signature[name] = f"*{names[value.dtype]}"
                attributes[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and specialised and value % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        kernels.add(self.__name__)
        modules.append(compiled.asm["ttgir"])

    JITFunction.run = run
    return kernels, ones, modules


def _order(module: str) -> str:
    """What is reduced, and what tensor cores multiply, with the layouts written out."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", module, re.MULTILINE))
    reduced = re.findall(r'"tt\.reduce"\(.*?\}\) : \((.*?)\) -> ', module, re.DOTALL)
    products = re.findall(r"(?:warp_group_dot|tt\.dot) .*? : (.*?)(?: loc\(.*)?$", module, re.MULTILINE)

    def spelled(text: str) -> str:
        while "#" in (text := re.sub(r"#(\w+)", lambda m: layouts.get(m[0], m[1]), text)):
            pass
        return text

    return " ; ".join(f"# {spelled(text)}" for text in reduced + products if "xf32" in text)  # maxima of keys have no order


def _launch_all() -> None:
    from tkernels import activation, head, layernorm, logits, logprobs, quant, rmsnorm, sampling
    from tkernels._linear_kernels import Tile, launch
    from tkernels._qkv_kernels import launch as launch_qkv
    from tkernels.rope import _rope, _rope_and_cache

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    one, index = zeros(1, dtype=torch.float32), zeros(1, dtype=torch.int64)
    x, weight = zeros(1, 1), zeros(1)
    vector, matrix, sliced = Tile("vector", 1, 64, 1, 4, 1), Tile("matrix", 16, 32, 1, 4, 2), Tile("matrix", 16, 32, 2, 4, 2)
    for tile in (vector, matrix, sliced, Tile("matrix", 16, 32, 2, 2, 1)):
        launch(x, zeros(2, 1), zeros(2), weight, x, True, 1e-6, zeros(1, 1), tile)
        launch(x, zeros(1, 1), None, weight, None, False, 1e-6, zeros(1, 1, dtype=torch.int64), tile)
    split, direct = Tile("matrix", 16, 32, 1, 4, 2, splits=2), Tile("matrix", 16, 32, 2, 2, 1, splits=2)
    for tile in (split, direct):
        launch(x, zeros(1, 1), None, None, None, False, 1e-6, zeros(1, 1), tile)
    head._best_kernel[(1,)](index, index, 1, 1, BLOCK=1024, num_warps=4)
    rmsnorm.launch(x, weight, 1e-6, 0.0, residual=x)
    rmsnorm.launch(x, weight, 1e-6, 0.0, block=16)
    embedding = sys.modules["tkernels.embedding"]  # the attribute of that name is the function
    embedding._embedding_rms_norm(index, x, weight, 1e-6)
    embedding._embedding(index, x)
    embedding._embedding(index, x, index, index)
    layernorm._layer_norm(x, weight, weight)
    activation._silu_and_mul(zeros(1, 2))
    activation.launch(x, x, 1, 0, "gelu_tanh", scale=one)
    quant._quantize_fp8_dynamic(x, 0)
    quant._quantize_fp8(x, one)
    heads, cache, table = zeros(1, 1, 2), zeros(1, 1, 1, 2, dtype=torch.float8_e4m3fn), zeros(1, 2, dtype=torch.float32)
    _rope_and_cache(heads, heads, heads, index, table, cache, cache, index, k_scale=one, v_scale=one)
    _rope(heads, heads, index, table, True, zeros(2), zeros(2))
    for tile in (Tile("vector", 2, 64, 1, 4, 1), matrix, sliced, split, direct):
        norm = None if tile.splits > 1 else weight
        launch_qkv(x, zeros(6, 1), zeros(6), norm, 1e-6, index, table, cache, zeros(1, 1, 1, 2), index, tile == matrix, heads, tile)
    for vocab in (1, 129):
        for min_p in (None, one):
            sampling._sample(zeros(1, vocab), one, one.to(torch.int32), one, index, index, min_p)
        counts, words = zeros(1, vocab, dtype=torch.int32), zeros(1, -(-vocab // 32), dtype=torch.int32)
        logits._adjust(zeros(1, vocab), index, counts, one, one, one, one.to(torch.int32)[:, None], one[:, None], words)
        logits._adjust(zeros(1, vocab), mask=words)
        logprobs._top_logprobs(zeros(1, vocab), index, 1)
    for prompt in (False, True):
        logits._count(counts, index, index, prompt)


def _launch_projections(modules: list[str]) -> None:
    """With rows of x that no vector load can take, where most is left to the layouts."""
    from tkernels._linear_kernels import Tile, launch
    from tkernels._qkv_kernels import launch as launch_qkv

    x, weight, norm = torch.zeros(8, 264, dtype=torch.bfloat16)[:, :256], torch.zeros(192, 256, dtype=torch.bfloat16), torch.zeros(256)
    index, table, (k_cache, v_cache) = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 64), torch.zeros(2, 1, 8, 1, 64).bfloat16()
    # The tile's width is the length of its step: what is stored has the shape of what is loaded.
    direct, vector = Tile("matrix", 16, 64, 4, 4, 1), Tile("vector", 2, 256, 1, 4, 1)
    for tile in (Tile("matrix", 64, 64, 1, 4, 2), Tile("matrix", 16, 16, 4, 4, 2), direct, vector):
        rows = 2 if tile.kind == "vector" else 8
        q, y, keys = torch.zeros(rows, 1, 64).bfloat16(), torch.zeros(rows, 192).bfloat16(), torch.zeros(192, rows, dtype=torch.int64)
        modules.clear()
        launch(x[:rows], weight, None, norm, None, False, 1e-6, y, tile)
        launch(x[:rows], weight, None, norm, None, False, 1e-6, keys, tile)
        launch_qkv(x[:rows], weight, None, norm, 1e-6, index, table, k_cache, v_cache, index, False, q, tile)
        for name, module in zip(("linear", "argmax", "rope"), modules, strict=True):
            print(tile, name, _order(module), sep="|")


if __name__ == "__main__":
    kernels, ones, modules = _compile_at_launch()
    if sys.argv[1] == "orders":
        _launch_projections(modules)
    else:
        _launch_all()
        print(*sorted(kernels), "|", *sorted(ones))
