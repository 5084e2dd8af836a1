"""Cutting at splitting ops: names, flat pieces, merged views, tuples, aliases and writes across pieces. Nothing is compiled here."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn

from runtime.backend import compile_callable
from runtime.config import CompileConfig
from runtime.overlap import Extent, overlaps
from runtime.split import SplitError, resolve_ops
from tests.runtime.toy_ops import DYNAMIC, Stack, ops, step


def compiled(module, *args, splitting=("toysplit::attend_out",), dynamic=None, **kwargs):
    config = CompileConfig(backend="eager", splitting_ops=list(splitting))
    return compile_callable(module, args, kwargs, config, dynamic or {})


def kinds(made) -> str:
    """One letter a piece: g for a graph, s for a splitting op."""
    return "".join(piece.kind[0] for piece in made.pieces)


def module_of(function) -> nn.Module:
    class Module(nn.Module):
        def forward(self, *args):
            return function(*args)

    # inspect.signature must see the function's own names
    Module.forward = lambda self, x, y=None: function(x) if y is None else function(x, y)
    return Module()


# ------------------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    "name",
    [
        "toysplit.attend_out",
        "toysplit::attend_out",
        "toysplit::attend_out.default",
        "toysplit.attend_out.default",
        "torch.ops.toysplit.attend_out",
    ],
)
def test_b043_every_spelling_gives_two_pieces_a_layer_and_one(name):
    made = compiled(Stack(2), *step(8), splitting=[name], dynamic=DYNAMIC)
    assert kinds(made) == "gsgsg"
    assert made.report.calls == {"toysplit::attend_out": 2}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("toysplit::attendout", "did you mean 'toysplit::attend_out'"),
        ("toysplit::attend_out.out", "it has default"),
        ("attend_out", "expected a name such as"),
        ("no_such_package::op", "import the package"),
    ],
)
def test_b043_a_name_that_no_registered_op_has_raises(name, says):
    with pytest.raises(SplitError, match="splitting_ops") as error:
        resolve_ops([name])
    assert says in str(error.value) and name in str(error.value)


def test_b043_a_registered_op_that_is_never_called_is_said():
    made = compiled(Stack(2), *step(8), splitting=["toysplit::never"], dynamic=DYNAMIC)
    assert kinds(made) == "g"
    assert made.report.calls == {"toysplit::never": 0}
    assert any("toysplit::never is never called" in note for note in made.report.notes)


def test_an_empty_list_of_splitting_ops_gives_one_piece():
    made = compiled(Stack(2), *step(8), splitting=[], dynamic=DYNAMIC)
    assert kinds(made) == "g" and not made.report.notes


def test_an_aten_op_cuts_the_torch_function_that_becomes_it():
    def body(x):
        return torch.softmax(x * 2, -1).softmax(0) + 1

    made = compiled(module_of(body), torch.randn(4, 4), splitting=["aten::softmax"])
    assert kinds(made) == "gssg"


# ------------------------------------------------------------------------------------------------------------------ pieces


def check(module, *args, splitting, expect, **kwargs):
    made = compiled(module, *args, splitting=splitting, **kwargs)
    assert kinds(made) == expect
    torch.testing.assert_close(made(*args), module(*args), rtol=0, atol=0)

    def flat(piece, function, inputs):  # pieces take and give flat tensors and sizes only
        outputs = function(*inputs)
        assert isinstance(outputs, tuple) and all(type(t) is torch.Tensor for t in outputs)
        assert all(isinstance(value, (torch.Tensor, int)) for value in inputs)
        assert len(inputs) == len(piece.inputs) and len(outputs) == len(piece.outputs)
        return outputs

    torch.testing.assert_close(made.run(args, {}, on_piece=flat), module(*args), rtol=0, atol=0)
    return made


def test_b068_an_op_with_two_outputs_used_in_two_later_pieces():
    def body(x):
        out, lse = ops.pair(x + 1, x)
        y = ops.mix(out * 2)
        return y + lse[:, None], lse

    made = check(module_of(body), torch.randn(4, 3), splitting=["toysplit::pair", "toysplit::mix"], expect="gsgsg")
    assert made.pieces[1].fresh and len(made.pieces[1].outputs) == 2


def test_a_tuple_used_as_a_whole_in_a_later_piece():
    def body(x):
        parts = (x * 2).chunk(3, dim=-1)
        y = ops.mix(parts[0])
        return torch.cat(parts, dim=0) + y.sum()

    check(module_of(body), torch.randn(4, 6), splitting=["toysplit::mix"], expect="gsg")


def test_pieces_without_work_are_merged_into_the_splitting_op():
    def body(x):
        y = ops.mix(x.view(-1, 4).t()[1:])  # only views before
        y = ops.mix(y.unsqueeze(0).squeeze(0))  # only views between
        return y.t()  # and after

    check(module_of(body), torch.randn(6, 4), splitting=["toysplit::mix"], expect="ss")


def test_an_allocation_is_work():
    """The buffer that a splitting op writes must be allocated by a piece: from the pool, at one address."""

    def body(x, y):
        out = torch.empty_like(x)
        ops.attend_out(x, y, y, 2, out)
        return out

    made = check(module_of(body), torch.randn(4, 3), torch.randn(4, 3), splitting=["toysplit::attend_out"], expect="gs")
    assert made.pieces[1].inputs[-1].owner == "piece 0" or ("out", "piece 0") in made.pieces[1].inputs
    assert made.pieces[1].fresh == ()


def test_equal_layers_share_one_piece():
    made = compiled(Stack(6), *step(8), dynamic=DYNAMIC)
    graphs = [piece for piece in made.pieces if piece.kind == "graph"]
    assert len(graphs) == 7 and made.report.distinct == 3
    assert {piece.same_as for piece in graphs[1:-1]} == {2}


@pytest.mark.parametrize(
    "second",
    [
        lambda x: ops.mix(x * 2.0) + 1,  # a constant of another type
        lambda x: ops.mix(x * 3) + 1,  # another constant
        lambda x: ops.mix(x.double() * 2).float() + 1,  # another dtype
        lambda x: ops.mix(x[:2] * 2).sum() + x,  # another shape
    ],
)
def test_pieces_that_differ_are_not_shared(second):
    def body(x):
        return second(ops.mix(x * 2) + 1)

    made = check(module_of(body), torch.randn(4, 3), splitting=["toysplit::mix"], expect="gsgsg")
    graphs = [piece.same_as for piece in made.pieces if piece.kind == "graph"]
    assert len(set(graphs)) == 3


def test_sizes_are_computed_in_each_piece_that_needs_them():
    def body(x):
        n = x.shape[0] * 2 + 1
        y = ops.mix(x + n)
        return y * n + y.new_zeros(n).sum() + torch.arange(x.size(0), device=x.device)[:, None]

    module = module_of(body)
    made = compiled(module, torch.randn(8, 3), splitting=["toysplit::mix"], dynamic={"x": 0})
    assert kinds(made) == "gsg"
    for tokens in (0, 1, 5, 8):
        x = torch.randn(tokens, 3)
        torch.testing.assert_close(made(x), module(x), rtol=0, atol=0)


def test_a_piece_that_gets_a_derived_size_gets_the_size_itself():
    """A compiler cannot solve 2 * n for n."""

    def body(x):
        return ops.mix(torch.cat([x, x])) * 2

    made = compiled(module_of(body), torch.randn(8, 3), splitting=["toysplit::mix"], dynamic={"x": 0})
    assert dict(made.pieces[2].inputs)["x.shape[0]"] == "size"


def test_a_region_that_cannot_be_cut_is_refused():
    def body(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = ops.mix(x @ x)
            return y @ y

    with pytest.raises(SplitError, match="autocast"):
        compiled(module_of(body), torch.randn(4, 4), splitting=["toysplit::mix"])


def test_autocast_inside_a_piece_is_kept():
    def body(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x
        return ops.mix(y) + 1

    made = check(module_of(body), torch.randn(4, 4), splitting=["toysplit::mix"], expect="gsg")
    assert made(torch.randn(4, 4)).dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------------- writes and aliases


def both(function, splitting, *args):
    """Results and arguments afterwards, of the cut module and of the module itself, on equal arguments."""
    module = module_of(function)
    mine, theirs = [a.clone() for a in args], [a.clone() for a in args]
    made = compiled(module, *[a.clone() for a in args], splitting=splitting)
    return (made(*mine), mine), (module(*theirs), theirs), made


def test_b025_a_middle_piece_that_writes_an_input():
    def body(x):
        y = ops.mix(x)
        x.add_(1)
        return ops.mix(y * x) + x

    mine, theirs, made = both(body, ["toysplit::mix"], torch.randn(4, 3))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert made.mutates == ("x",)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__(0, 7.0),
        lambda x: torch.nn.functional.relu(x, True),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x[1:].mul_(3),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: ops.write(x[:1] * 2, x, torch.tensor([2])),
    ],
    ids=["setitem", "inplace flag", "out", "view", "foreach", "custom op"],
)
def test_b025_every_way_to_write_is_seen(write):
    def body(x):
        y = ops.mix(x)
        write(x)
        return ops.mix(y * x) + x

    mine, theirs, made = both(body, ["toysplit::mix"], torch.randn(4, 3))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert made.mutates == ("x",)


def test_an_op_called_with_one_tensor_twice_writes_both_arguments():
    """What a call writes is remembered by its arguments, and f(x, x) is not f(x, y)."""

    def body(x, y):
        x.copy_(y)
        x.copy_(x)
        y.copy_(x * 2)
        return ops.mix(x) + y

    mine, theirs, made = both(body, ["toysplit::mix"], torch.randn(4, 3), torch.randn(4, 3))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert set(made.mutates) == {"x", "y"}


def test_an_output_buffer_seen_through_a_view_stays_one_buffer():
    """Inductor may give ``flat`` and its view two buffers; the view must be made by the splitting op's own piece."""

    def body(x, y):
        flat = torch.empty(x.numel())
        ops.attend_out(x, y, y, 2, flat.view(x.shape))
        return flat * 2

    mine, theirs, made = both(body, ["toysplit::attend_out"], torch.randn(4, 3), torch.randn(4, 3))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert made.pieces[0].outputs == ("flat",)


def test_outputs_that_alias_each_other_do_so_afterwards():
    def body(x):
        y = ops.mix(x) * 2
        return y, y.view(-1), y[0]

    (mine, _), _, _ = both(body, ["toysplit::mix"], torch.randn(4, 3))
    mine[0].zero_()
    assert not mine[1].any() and not mine[2].any()


# ---------------------------------------------------------------------------------------------------------------- overlap


def extent(tensor):
    return Extent.of(tensor, tensor.untyped_storage().data_ptr())


@pytest.mark.parametrize(
    ("take", "expected"),
    [
        (lambda t: (t[:, 0], t[:, 1]), False),  # k and v interleaved in one cache
        (lambda t: (t[:, 0], t[:, 0]), True),
        (lambda t: (t[0], t[1]), False),
        (lambda t: (t[:3], t[2:]), True),
        (lambda t: (t[..., :4], t[..., 4:]), False),
        (lambda t: (t[..., :5], t[..., 4:]), True),
        (lambda t: (t[:0], t), False),
        (lambda t: (t, t.clone()), False),
        (lambda t: (t, t.transpose(0, 2)), True),
    ],
)
def test_overlap_of_views_of_one_buffer(take, expected):
    a, b = take(torch.zeros(4, 2, 3, 8))
    assert overlaps(extent(a), extent(b)) is expected
    assert overlaps(extent(b), extent(a)) is expected


def test_overlap_agrees_with_counting():
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    for _ in range(300):
        stride = (draw(1, 9), draw(1, 4))
        views = [torch.zeros(80).as_strided((draw(1, 5), draw(1, 4)), stride, draw(0, 12)) for _ in range(2)]
        cells = [
            {view.storage_offset() + i * stride[0] + j * stride[1] for i in range(view.shape[0]) for j in range(view.shape[1])}
            for view in views
        ]
        a, b = (Extent(0, tuple(view.shape), view.stride(), view.storage_offset(), 4) for view in views)
        if cells[0] & cells[1]:
            assert overlaps(a, b)  # never missed
        elif stride[0] > (max(view.shape[1] for view in views) - 1) * stride[1]:
            assert not overlaps(a, b)  # and exact where strides nest


# ------------------------------------------------------------------------------------------------------- random programs


class RandomProgram(nn.Module):
    """A seeded list of operations on values [n, 4] and on views of them: reads, writes, splitting ops in any order."""

    STEPS = (
        "multiply", "matmul", "columns", "flat", "transposed", "mix", "mix", "pair", "attend", "attend into view",
        "add_", "write view", "write column", "write buffer", "read buffer", "concatenate", "copy_", "size", "halves",
    )  # fmt: skip

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = Random(seed)
        self.register_buffer("buffer", torch.zeros(16, 4))
        self.weight = nn.Parameter(torch.randn(4, 4) * 0.3, requires_grad=False)
        self.plan = [(random.choice(self.STEPS), *(random.random() for _ in range(3))) for _ in range(random.randint(6, 16))]
        self.returned = [random.random() for _ in range(random.randint(1, 4))]

    def forward(self, x, y):
        n, full, views = x.shape[0], [x, y], []
        for what, first, second, third in self.plan:
            a, b = full[int(first * len(full))], full[int(second * len(full))]
            if what == "multiply":
                full.append(a * b)
            elif what == "matmul":
                full.append((a @ self.weight).sin())
            elif what == "columns":
                views.append(a[:, 1:])
            elif what == "flat":
                views.append(a.reshape(-1))
            elif what == "transposed":
                views.append(a.t())
            elif what == "mix":
                full.append(ops.mix(a) * 0.5)
            elif what == "pair":
                p, q = ops.pair(a, b)
                full += [p, a + q[:, None]]
            elif what == "attend":
                full.append(torch.empty_like(a))
                ops.attend_out(a, b, a, 1, full[-1])
            elif what == "attend into view":
                views.append(torch.empty(n * 4))
                full.append(views[-1].view(n, 4))
                ops.attend_out(a, b, a, 1, full[-1])
            elif what == "add_":
                a.add_(0.5)
            elif what == "write view" and views:
                views[int(third * len(views))].mul_(0.5)
            elif what == "write column":
                a[:, 0] = b[:, 1]
            elif what == "write buffer":
                ops.write(a, self.buffer, torch.arange(n))
            elif what == "read buffer":
                full.append(a + self.buffer[:n])
            elif what == "concatenate":
                full.append(torch.cat([a[:, :2], b[:, 2:]], 1))
            elif what == "copy_":
                a.copy_(b.sin())
            elif what == "size":
                full.append(a * (n + 1))
            elif what == "halves":
                p, q = a.chunk(2, -1)
                full.append(torch.cat([ops.mix(q), p], -1))
        values = full + views
        return tuple(values[int(pick * len(values))] for pick in self.returned)


def storages(values):
    """Which of the values share memory."""
    keys = [value.untyped_storage().data_ptr() for value in values]
    return [keys.index(key) for key in keys]


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_equal_eager(seed):
    """Results, arguments, the module's buffer, and which results share memory, at the traced size and at others."""
    torch.manual_seed(seed)
    mine, theirs = RandomProgram(seed), RandomProgram(seed)
    theirs.load_state_dict(mine.state_dict())
    splitting = ["toysplit::mix", "toysplit::pair", "toysplit::attend_out"]
    made = compiled(mine, torch.randn(5, 4), torch.randn(5, 4), splitting=splitting, dynamic={"x": 0, "y": 0})
    for tokens in (5, 1, 8):
        x, y = torch.randn(tokens, 4), torch.randn(tokens, 4)
        mine_args, their_args = (x.clone(), y.clone()), (x.clone(), y.clone())
        results, expected = made(*mine_args), theirs(*their_args)
        torch.testing.assert_close([*results, *mine_args, mine.buffer], [*expected, *their_args, theirs.buffer], rtol=0, atol=0)
        assert storages([*results, *mine_args]) == storages([*expected, *their_args])
