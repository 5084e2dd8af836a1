"""The splitting backend with Inductor, with the model, and by torch.compile."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from runtime import pieces
from runtime.backend import compile_callable, inductor_available
from runtime.config import CompileConfig
from runtime.emulator import EmulatedPool
from tests.runtime.backend_cases import Counting, close, compiled, needs_inductor, same
from tests.runtime.toy_ops import DYNAMIC, LOG, Stack, ops, step

# ------------------------------------------------------------------------------------------------------------------ Inductor


@needs_inductor
def test_inductor_compiles_each_distinct_piece_once_and_never_again():
    module = Stack(6)
    pieces._COMPILED.clear()
    with Counting() as count:
        made = compiled(module, *step(8), dynamic=DYNAMIC, backend="inductor", sizes=[16])
    assert count.inductor == 3
    with Counting() as count:
        for tokens in (8, 0, 1, 2, 5, 300):
            args = step(tokens)
            close(made(*args), module(*args))
    assert (count.frames, count.inductor) == (0, 0)
    with Counting() as count:  # a size of its own: three more pieces, once
        for _ in range(2):
            args = step(16)
            close(made(*args), module(*args))
    assert count.inductor == 3
    with Counting() as count:  # another set of host values: traced again, the pieces are the same
        again = compiled(module, *step(8), dynamic=DYNAMIC, backend="inductor", scale=2)
    assert count.inductor == 0
    close(again(*args, scale=2), module(*args, scale=2))
    assert {piece.compiled for piece in made.pieces if piece.kind == "graph"} == {"inductor"}


class Cached(nn.Module):
    """Layers that write a cache each, k and v of all layers interleaved in one tensor, and read it in the splitting op."""

    layers = 1  # a second one adds a third piece to compile and nothing to see

    def __init__(self, pages: int = 512) -> None:
        super().__init__()
        caches = torch.zeros(self.layers, pages, 2, 4)
        for layer in range(self.layers):
            for which, name in enumerate(("k", "v")):
                self.register_buffer(f"{name}{layer}", caches[layer, :, which], persistent=False)

    def forward(self, x, slots):
        for layer in range(self.layers):
            k, v = getattr(self, f"k{layer}"), getattr(self, f"v{layer}")
            ops.write(x * 2, k, slots)
            ops.write(x + 1, v, slots)
            out = torch.empty_like(x)
            ops.attend_out(x, k[: x.shape[0]], v[: x.shape[0]], 1, out)
            x = x + torch.nn.functional.gelu(out)
        return x


@needs_inductor
def test_b030_b031_caches_that_share_storage_are_written_and_not_cloned():
    from torch._inductor.utils import run_and_get_code

    mine, theirs = Cached(), Cached()
    make = lambda n: (torch.randn(n, 4), torch.arange(n) * 3 - 3)  # slot −3: write nothing
    pieces._COMPILED.clear()
    with torch._inductor.config.patch(force_disable_caches=True):
        made, code = run_and_get_code(lambda: compiled(mine, *make(5), dynamic={"x": 0, "slots": 0}, backend="inductor"))
    # torch before 2.13 cannot compile a slice of unknown length for sizes 0 and 1
    assert (made.report.min_size == 0 and made.report.notes == []) or (made.report.min_size == 2 and torch.__version__ < "2.13")
    assert len(code) >= 2
    for source in code:
        assert "toysplit.write" in source or "attend_out" not in source
        assert "512" not in "".join(line for line in source.splitlines() if "empty_strided" in line), "a cache-sized buffer is made"
        assert ".clone(" not in source and "copy_(" not in source
    from runtime.capture import capture_step

    pool, args = EmulatedPool(torch.device("cpu")), make(2)
    made(*args), theirs(*args)
    with pool.session(), torch.no_grad():
        captured = capture_step(
            pool, made, args, {}, splitting=frozenset({ops.attend_out.default}), persistent=dict(mine.named_buffers())
        )  # fmt: skip
    theirs(*args)
    assert "k0" in captured.written, "what compiled code writes is known to the capture (k0 and v0 lie in one storage)"
    for tokens in (5, max(1, made.report.min_size), 9):
        args = make(tokens)
        close(made(*args), theirs(*args))
        for name, buffer in theirs.named_buffers():
            close(dict(mine.named_buffers())[name], buffer)
    assert mine.k0[3].any() and not mine.k0[1].any()


@needs_inductor
def test_b026_a_piece_that_writes_memory_it_reads_elsewhere_is_not_compiled():
    class Overlapping(nn.Module):
        def __init__(self):
            super().__init__()
            base = torch.arange(12.0)
            self.register_buffer("low", base[:8])
            self.register_buffer("high", base[4:])

        def forward(self, x):
            self.low.add_(x)
            return self.high * 2 + x

    mine, theirs = Overlapping(), Overlapping()
    made = compiled(mine, torch.ones(8), backend="inductor", splitting=[])
    assert any("it writes low, which overlaps high" in note for note in made.report.notes)
    same(made(torch.ones(8)), theirs(torch.ones(8)))


@needs_inductor
def test_b025_inductor_pieces_write_inputs_and_views_as_eager_does():
    class Writes(nn.Module):
        def forward(self, x):
            y = x * 3
            rows, flat = y[1:], y.view(-1)
            z = ops.mix(x)  # cut
            rows.add_(1)
            x.mul_(2)
            z = ops.mix(z)  # cut
            return z + flat.sum() + y, x, flat

    module = Writes()
    made = compiled(module, torch.randn(4, 3), splitting=["toysplit::mix"], backend="inductor")
    x = torch.randn(4, 3)
    mine, theirs = x.clone(), x.clone()
    close(made(mine), module(theirs))
    close(mine, theirs)


@needs_inductor
def test_an_op_that_only_has_effects_is_not_dropped():
    class Logs(nn.Module):
        def forward(self, x):
            ops.log(x)
            return x * 2 + 1

    made = compiled(Logs(), torch.ones(3), backend="inductor", splitting=[])
    LOG.clear()
    same(made(torch.ones(3)), torch.full((3,), 3.0))
    assert len(LOG) == 1 and any("a compiler would drop it" in note for note in made.report.notes)


@needs_inductor
def test_split_capture_compiles_the_whole_step_as_one_piece():
    module = Stack(2)
    config = CompileConfig(backend="inductor", splitting_ops=["toysplit::attend_out"], split="capture")
    made = compile_callable(module, step(8), {}, config, DYNAMIC)
    assert [piece.kind for piece in made.pieces] == ["graph"] and made.report.calls == {"toysplit::attend_out": 2}
    for tokens in (8, 3):
        args = step(tokens)
        close(made(*args), module(*args))


# ------------------------------------------------------------------------------------------------------------------ the model


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=needs_inductor)])
def test_a_causal_lm_of_two_layers(backend, device):
    """Prefill, decode, mixed and padded steps of the model: five pieces, logits and every byte of the caches as in eager."""
    from tests.runtime.paged import PagedModel
    from tests.runtime.tiny import tiny_model

    model = tiny_model(device)
    names = ["input_ids", "positions", "slot_mapping", "block_table", "seq_lens", "cu_seqlens_q", "logits_rows"]
    dims = dict(zip(names, ["tokens"] * 3 + ["seqs"] * 2 + ["seqs+1", "rows"], strict=True))
    mine, theirs, made = PagedModel(model), PagedModel(model), []

    def run(*args):
        if not made:
            config = CompileConfig(backend=backend)
            made.append(compile_callable(model, args, {}, config, {name: {0: dim} for name, dim in dims.items()}))
        with Counting() as count:
            result = made[0](*args)
        assert (count.frames, count.inductor) == (0, 0)
        return result

    mine.run = run
    steps = [
        ({"a": [1, 2, 3, 4, 5], "b": [7]}, 0, 0),
        ({"a": [3]}, 0, 0),
        ({"a": [4], "b": [5], "c": [6, 7]}, 0, 0),
        ({"a": [9], "b": [8]}, 2, 1),
    ]
    for new, pad_tokens, pad_seqs in steps:
        arguments = {"pad_tokens": pad_tokens, "pad_seqs": pad_seqs, "max_query_len": 8}
        close(mine.step(new, **arguments), theirs.step(new, **arguments))
        for cache, expected in zip(mine.caches, theirs.caches, strict=True):
            torch.testing.assert_close(cache, expected, rtol=2e-5, atol=2e-5, equal_nan=True)
    (made,) = made
    assert [piece.kind for piece in made.pieces] == ["graph", "split", "graph", "split", "graph"]
    assert made.report.distinct == 3 and made.report.min_size == 0 and made.report.notes == []
    assert {piece.compiled for piece in made.pieces if piece.kind == "graph"} == {backend}
    assert set(made.mutates) == {f"layers.{layer}.attention.{which}_cache" for layer in (0, 1) for which in "kv"}


@needs_inductor
def test_b025_values_that_inductor_merges_are_kept_apart_when_one_is_written():
    """Inductor returns ``y`` for ``y + 0``: one buffer for two values, and the later write would be seen in both."""

    class Merges(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(8, 3))

        def forward(self, x):
            y = torch.cat([x[:, :1], x[:, 1:] * 3], 1)
            z = y + torch.zeros(x.shape[0], 3)
            ops.write(z, self.cache, torch.arange(x.shape[0]))
            x = ops.mix(x)
            y.mul_(2)
            return z + ops.mix(x), y

    module = Merges()
    made = compiled(module, torch.randn(4, 3), splitting=["toysplit::mix"], backend="inductor", dynamic={"x": 0})
    for tokens in (0, 4, 2):  # an empty step shows nothing and must not settle the question
        x = torch.randn(tokens, 3)
        close(made(x), module(x))


def test_without_a_compiler_inductor_says_so():
    from torch._inductor import cpp_builder, exc

    pieces._COMPILED.clear()
    with mock.patch.object(cpp_builder, "get_cpp_compiler", side_effect=exc.InvalidCxxCompiler()):
        assert "C++ compiler" in inductor_available("cpu")
        with pytest.raises(RuntimeError, match=r'C\+\+ compiler.*compile\.backend = "eager"'):
            compiled(Stack(1), *step(8), dynamic=DYNAMIC, backend="inductor")
        compiled(Stack(1), *step(8), dynamic=DYNAMIC, backend="eager")


# ------------------------------------------------------------------------------------------------------------- torch.compile


def options(**more):
    return {"splitting_ops": ["toysplit::attend_out"], "backend": "eager", **more}


def test_torch_compile_by_name():
    module = Stack(2)
    made = torch.compile(module, backend="tkernels", options=options(), fullgraph=True)
    args = step(8)
    with torch.no_grad():
        same(made(*args), module(*args))


def test_torch_compile_with_one_unknown_size_compiles_once():
    module = Stack(2)
    made = torch.compile(module, backend="tkernels", options=options(), fullgraph=True)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad(), mock.patch("runtime.stitched.cut", wraps=__import__("runtime.stitched", fromlist=["cut"]).cut) as cuts:
        for tokens in (8, 1, 0, 30):
            args = step(tokens)
            for arg in args:
                torch._dynamo.decorators.mark_unbacked(arg, 0, shape_id="tokens")
            same(made(*args), module(*args))
    assert cuts.call_count == 1


@needs_inductor
def test_torch_compile_with_inductor():
    module = Stack(2)
    made = torch.compile(module, backend="tkernels", options=options(backend="inductor"), fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (8, 5):
            args = step(tokens)
            close(made(*args), module(*args))


def test_torch_compile_refuses_what_it_does_not_do():
    module, args = Stack(1), step(8)
    with pytest.raises(Exception, match="inference-only"):
        torch.compile(module, backend="tkernels", options=options())(*args)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=r"did you mean compile\.splitting_ops"):
        torch.compile(module, backend="tkernels", options={"spliting_ops": []})(*args)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="no op 'toysplit::typo' is registered"):
        torch.compile(module, backend="tkernels", options=options(splitting_ops=["toysplit::typo"]))(*args)
