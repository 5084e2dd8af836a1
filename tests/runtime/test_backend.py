"""The stitched callable: no recompilation, guards kept, parameters by name, caches not cloned, both backends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime.backend import BindError, TraceError
from runtime.emulator import EmulatedPool
from tests.runtime.backend_cases import Counting, compiled, needs_inductor, same
from tests.runtime.toy_ops import DYNAMIC, Stack, ops, step

# ------------------------------------------------------------------------------------------------------------ sizes, guards


def test_one_trace_serves_every_size_from_zero():
    module = Stack(2)
    made = compiled(module, *step(8), dynamic=DYNAMIC)
    assert made.report.min_size == 0
    with Counting() as count:
        for tokens in (0, 1, 2, 3, 7, 8, 64, 512):
            args = step(tokens)
            same(made(*args), module(*args))
    assert (count.frames, count.inductor) == (0, 0)


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_the_size_of_the_example_does_not_matter(tokens):
    module = Stack(1)
    made = compiled(module, *step(tokens), dynamic=DYNAMIC)
    for other in (0, 1, 5):
        args = step(other)
        same(made(*args), module(*args))


class Seqs(nn.Module):
    """Three names: tokens, seqs, seqs + 1."""

    def forward(self, ids, lens, cu):
        torch._check(cu.shape[0] == lens.shape[0] + 1)
        starts = torch.searchsorted(cu, torch.arange(ids.shape[0], device=ids.device), right=True) - 1
        return ids * lens[starts.clamp(max=lens.shape[0] - 1)], (cu[1:] - cu[:-1]) * lens


SEQS = {"ids": 0, "lens": {0: "seqs"}, "cu": {0: "seqs+1"}}


def seqs_step(tokens, seqs):
    cu = torch.linspace(0, tokens, seqs + 1).long()
    return torch.arange(tokens), torch.arange(seqs) + 2, cu


def test_several_named_sizes():
    module = Seqs()
    made = compiled(module, *seqs_step(8, 8), dynamic=SEQS)  # equal on purpose: the names must not become one
    for tokens, seqs in ((8, 8), (8, 3), (1, 1), (30, 7), (5, 1)):
        same(made(*seqs_step(tokens, seqs)), module(*seqs_step(tokens, seqs)))
    assert made.sizes(seqs_step(30, 7), {}) == {"tokens": 30, "seqs": 7}
    ids, lens, cu = seqs_step(8, 3)
    with pytest.raises(BindError, match=r"cu: dimension 0 is seqs\+1, expected 4 like lens, got 3"):
        made(ids, lens, cu[:3])


class Branching(nn.Module):
    def forward(self, x):
        if x.shape[0] > 4:
            return ops.mix(x) + 1
        return ops.mix(x) * 2


@pytest.mark.parametrize(("traced", "other"), [(8, 2), (3, 8)])
def test_b071_a_branch_on_the_size_is_kept_as_a_guard(traced, other):
    module = Branching()
    made = compiled(module, torch.randn(traced, 2), splitting=["toysplit::mix"], dynamic={"x": 0})
    assert made.report.min_size == 2 and any("pad 1 to 2" in note for note in made.report.notes)
    x = torch.randn(traced + (1 if traced > 4 else -1), 2)
    same(made(x), module(x))
    with pytest.raises(BindError, match=r"x\.shape\[0\] .*got x\.shape\[0\] = " + str(other)) as refused:
        made(torch.randn(other, 2))
    assert "if x.shape[0] > 4" in str(refused.value)


def test_b071_a_size_that_the_code_freezes_is_refused_elsewhere():
    class Frozen(nn.Module):
        def forward(self, x):
            return x + torch.ones(int(x.shape[0]) * 1, 2) if x.shape[0] % 8 == 0 else x - 1

    module = Frozen()
    made = compiled(module, torch.randn(8, 2), dynamic={"x": 0})
    x = torch.randn(16, 2)
    same(made(x), module(x))
    with pytest.raises(BindError):
        made(torch.randn(9, 2))


def test_two_names_that_the_module_takes_for_equal_are_told_apart():
    class Adds(nn.Module):
        def forward(self, a, b):
            return a + b

    made = compiled(Adds(), torch.ones(4), torch.ones(4), dynamic={"a": 0, "b": {0: "seqs"}})
    same(made(torch.ones(6), torch.ones(6)), torch.full((6,), 2.0))
    with pytest.raises((BindError, RuntimeError)):
        made(torch.ones(6), torch.ones(5))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ids, positions: (ids.int(), positions), r"ids: traced with torch\.int64, got torch\.int32"),
        (lambda ids, positions: (ids, positions.repeat(2)[::2]), "positions: traced contiguous, got strides"),
        (lambda ids, positions: (ids[None], positions), r"ids: traced with shape \['any'\], got \[1, 8\]"),
        (lambda ids, positions: (ids, positions[:5]), "positions: dimension 0 is tokens, expected 8 like ids, got 5"),
        (lambda ids, positions: (ids, 3), "positions: traced with a tensor, got int"),
        (lambda ids, positions: (ids,), "missing a required argument: 'positions'"),
        (lambda ids, positions: (ids.to("meta"), positions), "ids: traced on cpu, got meta"),
    ],
)
def test_what_dynamo_guards_would_have_caught_is_caught(change, says):
    made = compiled(Stack(1), *step(8), dynamic=DYNAMIC)
    made(*step(8))
    with pytest.raises(BindError, match=says):
        made(*change(*step(8)))


def test_host_values_and_training_are_part_of_the_code():
    module = Stack(1)
    made = compiled(module, *step(8), dynamic=DYNAMIC, scale=3)
    args = step(8)
    same(made(*args, scale=3), module(*args, scale=3))
    for other in (4, 3.0, True):
        with pytest.raises(BindError, match="scale: a host value is part of the code, traced with 3"):
            made(*args, scale=other)
    module.eval()
    with pytest.raises(BindError, match="training"):
        made(*step(7), scale=3)


def test_keyword_positional_and_default_arguments_are_one_signature():
    module = Stack(1)
    made = compiled(module, *step(8), dynamic=DYNAMIC)
    ids, positions = step(5)
    expected = module(ids, positions)
    same(made(positions=positions, ids=ids), expected)
    same(made(ids, positions, scale=1), expected)


def test_arguments_in_containers():
    class Nested(nn.Module):
        def forward(self, batch, *extra, **named):
            return {"a": batch["x"] + extra[0][0], "b": (named["z"] * 2, None)}

    module = Nested()
    make = lambda n: (({"x": torch.randn(n, 2)}, [torch.randn(n, 2)]), {"z": torch.randn(3)})
    args, kwargs = make(4)
    made = compiled(module, *args, **kwargs, dynamic={"batch": 0, "extra.0.0": 0})
    for tokens in (1, 9):
        args, kwargs = make(tokens)
        same(made(*args, **kwargs), module(*args, **kwargs))
    with pytest.raises(TraceError, match="dynamic: 'bach' is not an argument"):
        compiled(module, *args, **kwargs, dynamic={"bach": 0})


@pytest.mark.parametrize("use", [lambda first, x: x * 2, lambda first, x: x * first.shape[0]], ids=["unused", "size only"])
def test_an_argument_that_gives_only_its_size(use):
    class Sized(nn.Module):
        def forward(self, first, x):
            return ops.mix(use(first, x))

    module = Sized()
    made = compiled(module, torch.zeros(4), torch.ones(4), splitting=["toysplit::mix"], dynamic={"first": 0, "x": 0})
    for tokens in (6, 1):
        same(made(torch.zeros(tokens), torch.ones(tokens)), module(torch.zeros(tokens), torch.ones(tokens)))


def test_autocast_around_the_call_is_part_of_the_code():
    module = nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = compiled(module, x)
        assert made(x).dtype == torch.bfloat16
    with pytest.raises(BindError, match=r"autocast: traced with .*bfloat16.*, it is now none"):
        made(x)


# ------------------------------------------------------------------------------------------------------- module's own tensors


def test_parameters_are_read_by_name_at_each_call():
    module = Stack(1)
    made = compiled(module, *step(8), dynamic=DYNAMIC)
    assert made.persistent()["layers.0.qkv.weight"] is module.layers[0].qkv.weight
    args = step(6)
    changes = [
        lambda: module.layers[0].qkv.weight.data.mul_(2),
        lambda: setattr(module.layers[0].qkv, "weight", nn.Parameter(torch.randn(24, 8))),
        lambda: setattr(module.layers[0].project.weight, "data", torch.randn(8, 8)),
        lambda: module.layers[0].project._parameters.__setitem__("weight", torch.randn(8, 8)),
        lambda: setattr(module, "table", torch.randn(64, 8)),
        lambda: module.layers.__setitem__(0, Stack(1).layers[0]),
    ]
    for change in changes:
        before = made(*args)
        change()
        same(made(*args), module(*args))
        assert not torch.equal(before, made(*args))


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.double(),
        lambda module: setattr(module, "table", torch.randn(32, 8)),
        lambda module: setattr(module, "table", torch.randn(8, 64).t()),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_a_parameter_of_another_layout_is_refused(change):
    module = Stack(1)
    made = compiled(module, *step(8), dynamic=DYNAMIC)
    change(module)
    with pytest.raises(BindError, match=r"compiled for .* it is now"):
        made(*step(8))


def test_plain_tensor_attributes_and_globals_are_found_again():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.randn(4)

        def forward(self, x):
            return ops.mix(x + self.table) + _GLOBAL

    global _GLOBAL
    _GLOBAL = torch.ones(4)
    module = Plain()
    made = compiled(module, torch.randn(3, 4), splitting=["toysplit::mix"])
    module.table, _GLOBAL = torch.randn(4), torch.zeros(4)
    x = torch.randn(3, 4)
    same(made(x), module(x))


def test_every_input_of_every_piece_has_an_owner():
    made = compiled(Stack(2), *step(8), dynamic=DYNAMIC)
    split = made.pieces[1]
    assert {name: owner for name, owner in split.inputs} == {name: "piece 0" for name, _ in split.inputs}
    owners = dict(made.pieces[2].inputs)
    assert owners["layers.0.project.weight"] == "persistent" and "piece 0" in owners.values()
    assert dict(made.pieces[0].inputs)["ids"] == "caller"


# ---------------------------------------------------------------------------------------------------------- overlap, capture


def test_b026_overlapping_arguments_are_refused_when_one_is_written():
    class Writes(nn.Module):
        def forward(self, x, y):
            x.mul_(2)
            return ops.mix(x) + y

    module = Writes()
    base = torch.randn(8, 3)
    made = compiled(module, base[:4].clone(), base[4:].clone(), splitting=["toysplit::mix"])
    for x, y in ((base[0:4], base[2:6]), (base[:4], base[:4])):
        with pytest.raises(BindError, match="x: the module writes it, and it overlaps y"):
            made(x, y)
    mine, theirs = base.clone(), base.clone()
    same(made(mine[:4], mine[4:]), module(theirs[:4], theirs[4:]))  # side by side in one storage is fine
    same(mine, theirs)


def test_b026_the_same_tensor_twice_does_not_tie_the_arguments():
    class Adds(nn.Module):
        def forward(self, q, k):
            return ops.mix(q * 2) + k

    q = torch.randn(4, 3)
    made = compiled(Adds(), q, q, splitting=["toysplit::mix"])
    k = torch.randn(4, 3)
    same(made(q, k), Adds()(q, k))
    same(made(k, k), Adds()(k, k))


def test_piece_by_piece():
    module = Stack(2)
    made = compiled(module, *step(8), dynamic=DYNAMIC)
    seen = []

    def on_piece(piece, function, inputs):
        seen.append((piece.index, piece.kind, piece.op))
        return function(*inputs)

    args = step(5)
    same(made.run(args, {}, on_piece=on_piece), module(*args))
    assert seen == [(i, "split" if i % 2 else "graph", "toysplit::attend_out" if i % 2 else "") for i in range(5)]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=needs_inductor)])
def test_capture_time_breaks_reach_the_stitched_callable(backend):
    """The other way of cutting, on the same callable: a capture meets the splitting op in the dispatcher."""
    from runtime.capture import capture_step

    module = Stack(2)
    made = compiled(module, *step(8), dynamic=DYNAMIC, backend=backend)
    ids, positions = step(4)
    made(ids, positions)
    pool = EmulatedPool(torch.device("cpu"))
    with pool.session(), torch.no_grad():
        captured = capture_step(
            pool, made, (ids, positions), {}, splitting=frozenset({ops.attend_out.default}),
            callers={"ids": ids, "positions": positions}, persistent=made.persistent(),
        )  # fmt: skip
    ids.copy_(step(4)[0])
    captured.replay()
    same(captured.output, made(ids, positions))
    assert len(captured.segments) == 5
    if backend == "inductor":  # compiled pieces name themselves and their inputs in the table of addresses
        assert {row.input for row in captured.addresses} >= {"piece 0 ids", "piece 0 layers.0.qkv.weight", "piece 2 layers.1.qkv.bias"}
