"""What every op promises, checked for every op that is registered: add its sample calls to op_samples.py.

opcheck (schema, fakes, autograd registration, AOT dispatch), torch.compile(fullgraph=True), outputs that never alias inputs or each
other, fakes with the real strides, a backward that raises, and inputs that stay as they were unless the schema declares a mutation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from op_samples import SAMPLES
from oracle import storage_of
from torch._subclasses.fake_tensor import FakeTensorMode

import tkernels
from tkernels._op import reference_ops


def _op(name: str) -> Any:
    return getattr(torch.ops.tkernels, name).default


def _needs_group(name: str) -> bool:
    """Collectives take a group and several processes: tests/tkernels/collectives holds them to the same contract."""
    return any(a.name == "group" for a in _op(name)._schema.arguments)


def _registered() -> list[str]:
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith("tkernels::"))
    return sorted(n.removeprefix("tkernels::").split(".")[0] for n in names)


OPS = [name for name in _registered() if not _needs_group(name)]
CHECKED = [name for name in OPS if name in SAMPLES]


def _outputs(result: Any) -> list[torch.Tensor]:
    return [x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, torch.Tensor)]


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]


def _mutated(name: str) -> set[str]:
    return {a.name for a in _op(name)._schema.arguments if a.alias_info is not None and a.alias_info.is_write}


def _named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((a.name for a in _op(name)._schema.arguments), args, strict=False)) | kwargs


def test_every_op_has_sample_calls() -> None:
    assert set(OPS) == set(SAMPLES), "each registered op needs an entry in op_samples.py, and each entry an op"


@pytest.mark.parametrize("name", CHECKED)
def test_b028_opcheck(name: str, device: torch.device) -> None:
    calls = SAMPLES[name](device)
    for args, kwargs in calls:
        torch.library.opcheck(_op(name), args, kwargs, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(_op(name), *calls[0], test_utils=("test_autograd_registration", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("name", CHECKED)
def test_b028_outputs_never_alias(name: str, device: torch.device) -> None:
    for args, kwargs in SAMPLES[name](device):
        inputs = {storage_of(x) for x in _tensors(args, kwargs) if x.numel()}
        outputs = [storage_of(x) for x in _outputs(_op(name)(*args, **kwargs)) if x.numel()]
        assert not inputs & set(outputs), "an output shares storage with an input"
        assert len(set(outputs)) == len(outputs), "two outputs share storage"


@pytest.mark.parametrize("name", CHECKED)
def test_only_declared_arguments_are_written(name: str, device: torch.device) -> None:
    for args, kwargs in SAMPLES[name](device):
        named = _named(name, args, kwargs)
        kept = {k: x for k, x in named.items() if isinstance(x, torch.Tensor) and k not in _mutated(name)}
        before = {k: x.clone() for k, x in kept.items()}
        _op(name)(*args, **kwargs)
        for key, x in kept.items():
            torch.testing.assert_close(x, before[key], rtol=0, atol=0, equal_nan=True, msg=f"{key} was written")


@pytest.mark.parametrize("name", CHECKED)
def test_b073_fake_outputs_look_like_real_ones(name: str, device: torch.device) -> None:
    for args, kwargs in SAMPLES[name](device):
        real = _outputs(_op(name)(*args, **kwargs))
        with FakeTensorMode() as mode:
            fake_args = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
            fake = _outputs(_op(name)(*fake_args[0], **fake_args[1]))
        assert len(real) == len(fake)
        for r, f in zip(real, fake, strict=True):
            want = (r.shape, r.stride(), r.dtype, r.device, r.storage_offset())
            assert (f.shape, f.stride(), f.dtype, f.device, f.storage_offset()) == want


@pytest.mark.parametrize("name", CHECKED)
def test_the_callers_autocast_changes_nothing(name: str, device: torch.device) -> None:
    """The kernel and the reference: products of torch's within either would follow it."""
    for run in (nullcontext, reference_ops):
        for args, kwargs in SAMPLES[name](device):
            other_args, other_kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            with run():
                want = _outputs(_op(name)(*args, **kwargs))
                with torch.autocast(device.type):
                    got = _outputs(_op(name)(*other_args, **other_kwargs))
            for g, w in zip(got, want, strict=True):
                assert g.dtype == w.dtype
                torch.testing.assert_close(g.float(), w.float(), rtol=1e-5, atol=1e-5, equal_nan=True)  # copies may lie otherwise
            for key in _mutated(name):
                mine, theirs = (_named(name, *call)[key] for call in ((args, kwargs), (other_args, other_kwargs)))
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CHECKED)
def test_compiles_in_one_graph(name: str, device: torch.device) -> None:
    calls = SAMPLES[name](device)

    def step(*args: Any, **kwargs: Any) -> Any:
        return _op(name)(*args, **kwargs)

    torch._dynamo.reset()  # or the ops before this one count towards the recompilation limit of ``step``
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    (args, kwargs), (other_args, other_kwargs) = calls[0], torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, calls[0])
    with torch.no_grad():
        got, want = _outputs(compiled(*args, **kwargs)), _outputs(step(*other_args, **other_kwargs))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
    for key, x in _named(name, args, kwargs).items():
        if key in _mutated(name):
            torch.testing.assert_close(x, _named(name, other_args, other_kwargs)[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CHECKED)
def test_gradients_are_refused_with_advice(name: str, device: torch.device) -> None:
    args, kwargs = SAMPLES[name](device)[0]
    first = next((i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
    if first is None:
        return  # integers have no gradients
    args = (*args[:first], args[first].detach().requires_grad_(), *args[first + 1 :])
    results: list[torch.Tensor] = []

    def run() -> None:
        results.extend(_outputs(_op(name)(*args, **kwargs)))
        sum(x.float().sum() for x in results if x.is_floating_point()).backward()

    if all(not x.is_floating_point() for x in _outputs(_op(name)(*SAMPLES[name](device)[0][0]))) and not _mutated(name):
        assert not any(x.requires_grad for x in _outputs(_op(name)(*args, **kwargs)))  # token ids: nothing to refuse
        return
    with pytest.raises(NotImplementedError, match="inference-only"):
        run()


@pytest.mark.parametrize("name", CHECKED)
def test_b161_empty_inputs_cold_and_warm(name: str, device: torch.device) -> None:
    """The last sample call of each op is the empty one: no launch, outputs of the right shape; also right after a full call."""
    calls = SAMPLES[name](device)
    args, kwargs = calls[-1]
    assert any(x.numel() == 0 for x in _tensors(args, kwargs)), "the last sample call is the empty one"
    _op(name)(*args, **kwargs)
    _op(name)(*calls[0][0], **calls[0][1])
    for x in _outputs(_op(name)(*args, **kwargs)):
        assert x.numel() == 0


@pytest.mark.parametrize("name", CHECKED)
def test_a_tensor_without_values_among_others_is_refused(name: str, device: torch.device) -> None:
    """torch gives such a call to the function of meta tensors, whose result on a real device is memory that nobody wrote."""
    args, kwargs = SAMPLES[name](device)[0]
    named = _named(name, args, kwargs)
    places = [key for key, x in named.items() if isinstance(x, torch.Tensor)]
    for key in places if len(places) > 1 else []:
        given = {k: x.to("meta") if k == key else x for k, x in named.items()}
        with pytest.raises(ValueError, match=rf"^{key if len(places) > 2 else '.*'}: expected a tensor on {device.type}.* got one on meta"):
            _op(name)(**given)


@pytest.mark.parametrize("call", [
    lambda x: tkernels.rms_norm(x, x.new_ones(8)),
    lambda x: tkernels.add_rms_norm(x.contiguous(), x, x.new_ones(8)),
    lambda x: tkernels.layer_norm(x, x.new_ones(8), None),
    lambda x: tkernels.silu_and_mul(x),
    lambda x: tkernels.gelu_mul(x.contiguous(), x),
    lambda x: tkernels.quantize_fp8_per_token(x),
    lambda x: tkernels.rms_norm_fp8_dynamic(x, x.new_ones(8), 1e-6),
    lambda x: tkernels.linear(x, x.new_ones(4, 8), norm_weight=x.new_ones(8)),
])  # fmt: skip
def test_references_refuse_the_strides_that_kernels_refuse(device: torch.device, call: Callable[[torch.Tensor], Any]) -> None:
    turned = torch.randn(8, 5, device=device).t()
    apart = torch.randn(2, 4, 5, 6, 8, device=device)[:, ::2, ::2, ::3]
    for x, problem in ((turned, "expected last stride 1"), (apart, "do not fold into rows; call .contiguous")):
        with pytest.raises(ValueError, match=problem):
            call(x)
        with reference_ops(), pytest.raises(ValueError, match=problem):
            call(x)
