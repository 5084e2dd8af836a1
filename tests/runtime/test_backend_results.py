"""The stitched callable: the structure of results, and what is refused, with its reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from runtime import pieces
from runtime.backend import BindError, PieceError, TraceError
from tests.runtime.backend_cases import close, compiled, needs_inductor, same
from tests.runtime.toy_ops import ops

# ---------------------------------------------------------------------------------------------------------- results, refusals


class Returns(nn.Module):
    def __init__(self, pick):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.pick = pick

    def forward(self, x):
        y = ops.mix(x + self.weight)
        return self.pick(self, x, y)


@pytest.mark.parametrize(
    "pick",
    [
        lambda m, x, y: y,
        lambda m, x, y: (y,),
        lambda m, x, y: [y, (y * 2, y)],
        lambda m, x, y: {"a": y, "b": None, "c": (1, "text", 2.5)},
        lambda m, x, y: (x, y),
        lambda m, x, y: (y, m.weight),
        lambda m, x, y: (y, x.shape[0], x.shape[0] * 2 + 1),
        lambda m, x, y: (y, x[0], y.t()),
        lambda m, x, y: (y.relu(), torch.arange(x.shape[0])),
    ],
    ids=["tensor", "tuple of one", "nested", "dict", "input", "parameter", "sizes", "views", "after"],
)
def test_b070_the_structure_of_the_result_is_kept(pick):
    module = Returns(pick)
    made = compiled(module, torch.randn(4, 3), splitting=["toysplit::mix"], dynamic={"x": 0})
    for tokens in (4, 6, 1):
        x = torch.randn(tokens, 3)
        mine, theirs = made(x), module(x)
        assert type(mine) is type(theirs)
        same(mine, theirs)
        if isinstance(theirs, tuple) and any(leaf is x for leaf in theirs):
            assert mine[0] is x
        if isinstance(theirs, tuple) and any(leaf is module.weight for leaf in theirs):
            assert mine[1] is module.weight


class Refused(nn.Module):
    calls = 0

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(self, x)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda m, x: (setattr(m, "calls", m.calls + 1), x * 2)[1], "side effects"),
        (lambda m, x: (setattr(m, "last", x * 3), x * 2)[1], "side effects"),
        (lambda m, x: x * x.sum().item(), r"reads a tensor's values .*x\.sum\(\)\.item\(\)"),
        (lambda m, x: x[x > 0], r"reads a tensor's values .*x\[x > 0\]"),
        (lambda m, x: sum(x[i] for i in range(x.shape[0])) * x, "fixes a size named there to 4, at: .*range"),
        (lambda m, x: 3, "computes nothing"),
        (lambda m, x: dataclasses.make_dataclass("Out", ["y"])(x * 2), "does not trace|cannot be rebuilt"),
    ],
    ids=["counter", "kept tensor", "item", "data-dependent shape", "loop over a size", "no graph", "unknown container"],
)
def test_what_cannot_be_stitched_is_refused_with_a_reason(body, says):
    with pytest.raises(TraceError, match=says):
        compiled(Refused(body), torch.randn(4, 3), dynamic={"x": 0})


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=needs_inductor)])
def test_a_slice_whose_length_torch_cannot_name_is_no_read_of_data(backend, monkeypatch):
    """torch before 2.13 gives it a symbol of its own, as it does to ``x.sum().item()``."""
    import torch._subclasses.fake_impls as fake_impls
    from torch.fx.experimental.symbolic_shapes import guard_or_false, sym_and

    named = getattr(fake_impls, "_compute_slice_index")  # noqa: B009

    def named_by_old_torch(size, index):
        """It tells an index that is known to lie inside, as that of an ordinary symbol, and no other."""
        inside = isinstance(index, int) or guard_or_false(sym_and(index >= 0, index <= size))
        return named(size, index) if inside else None

    monkeypatch.setattr(fake_impls, "_compute_slice_index", named_by_old_torch)

    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(64, 3))

        def forward(self, x, offsets):
            out = torch.empty_like(x)
            ops.attend_out(x, self.table[: x.shape[0]], x, 1, out)
            return out[(offsets[1:] - 1).clamp(min=0)]

    module, make = Sliced(), lambda n, s: (torch.randn(n, 3), torch.arange(s + 1) * n // s)
    made = compiled(module, *make(8, 2), dynamic={"x": 0, "offsets": {0: "seqs+1"}}, backend=backend)
    assert made.report.min_size == (0 if backend == "eager" else 2) and bool(made.report.notes) == (backend == "inductor")
    for tokens, seqs in ((8, 2), (9, 5), (max(1, made.report.min_size), 2)):
        args = make(tokens, seqs)
        close(made(*args), module(*args))


class Activated(nn.Module):
    def forward(self, x, scale=1):
        out = torch.empty_like(x)
        ops.attend_out(x * 2, x, x, scale, out)
        return torch.nn.functional.gelu(out)


def refusing(monkeypatch, refuses):
    """Inductor, which dies as torch 2.11 does of some unknown sizes. Returns the list of what it was asked to compile."""
    import torch._inductor
    from torch._inductor.exc import InductorError

    compile, asked = torch._inductor.standalone_compile, []

    def standalone_compile(module, values, **options):
        sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape if isinstance(size, torch.SymInt)]
        unknown = any(str(size.node.expr).startswith("u") for size in sizes)
        asked.append(unknown)
        if refuses(unknown):
            raise InductorError(AssertionError("failed OrderedSet([]) >= OrderedSet([u3]) (inductor >= fx)\nfx node is: slice"), None)
        return compile(module, values, **options)

    monkeypatch.setattr(torch._inductor, "standalone_compile", standalone_compile)
    monkeypatch.setattr(pieces, "_COMPILED", {})
    return asked


@needs_inductor
def test_a_piece_that_inductor_refuses_for_unknown_sizes_is_compiled_for_ordinary_ones(monkeypatch):
    asked = refusing(monkeypatch, lambda unknown: unknown)
    module = Activated()
    made = compiled(module, torch.randn(8, 3), dynamic={"x": 0}, backend="inductor")
    assert asked[0] and not any(asked[1:]) and {piece.compiled for piece in made.pieces if piece.kind == "graph"} == {"inductor"}
    assert made.report.min_size == 2
    (note,) = made.report.notes
    assert "pad 1 to 2: the compiler refuses code for any size at all (Inductor does not compile the piece of " in note
    assert "failed OrderedSet([]) >= OrderedSet([u3])" in note
    for tokens in (8, 2, 5):
        x = torch.randn(tokens, 3)
        close(made(x), module(x))
    with pytest.raises(BindError):
        made(torch.randn(1, 3))


@needs_inductor
def test_a_piece_that_inductor_refuses_for_every_size_is_named(monkeypatch):
    asked = refusing(monkeypatch, lambda unknown: True)
    with pytest.raises(PieceError, match=r"Inductor does not compile the piece of empty_like, mul: .*failed OrderedSet"):
        compiled(Activated(), torch.randn(8, 3), dynamic={"x": 0}, backend="inductor")
    assert asked == [True, False]


def test_tracing_computes_nothing_and_writes_nothing():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(4, 3))

        def forward(self, x):
            ops.write(x, self.cache, torch.arange(x.shape[0]))
            return x.add_(1)

    module, x = Writes(), torch.ones(2, 3)
    made = compiled(module, x, dynamic={"x": 0})
    assert not module.cache.any() and x.eq(1).all()
    assert set(made.mutates) == {"x", "cache"}
    assert not any(name.startswith("_dynamo") for name in vars(x)), "the caller's tensor must not be marked"
