"""Ops that repeat: a call that looks like an earlier one launches what the earlier one launched, on its own memory.

What an op launches may follow only from how its arguments look (shapes, strides, dtypes, device, alignment) and from host values, since a
captured graph repeats it for other data. So the second call that looks alike is taken down: the compiled kernels that Triton chose, their
grids and constants, and for each pointer whose address it is: an argument's, an output's, a temporary's or a counter's, or how far into
one of them it points (a view). From the third on the checks, the choice of tiles and Triton's launcher are skipped; left are allocations,
addresses and the launches themselves. A plan keeps no tensor.

What launches depend on beside arguments can be part of the look: ``beside``. A group of GPUs is one: its ranks, its time-out. A TMA
descriptor is of one of those addresses too, and is made again over another.

Where captures have dependent launches a captured call is made as ever, and an eager one repeats only what such an eager call has launched,
which loaded what the capture needs: another thread's may not have.

A call is not repeated but made as ever when it also calls torch, when a pointer is none of those (a constant of the op's own), while
Triton's launch hooks are set, and with a Triton whose compiled kernels are not known to be called like this. Two things that Triton
reads at each launch are read once here: ``TRITON_DEBUG`` and the globals that a kernel uses. An op whose kernel calls torch as well
can still have a part of it repeated: ``repeating`` takes any function that only launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from tkernels import _launch
from tkernels._triton import HAVE_TRITON, INTERPRETED, tl, triton

ENABLED = HAVE_TRITON and not INTERPRETED and triton.__version__.startswith(("3.6.", "3.7."))
DEPENDENT: Callable[[], bool] | None = None  # set once it was wanted: whether this thread's captures launch what eager calls do not
MOST = 1024  # plans of an op: prompts of ever other lengths should not fill the memory
_ALIGNMENT = 16  # bytes; what Triton specialises pointers on. torch's allocators give more.
_PIECE = 256  # temporaries start on multiples of this in their common allocation

Again = Callable[[], torch.Tensor | int]  # memory for another call, or its address on the device
_Look = tuple[torch.Size, tuple[int, ...], torch.dtype]
_tables: list[dict[Any, Any]] = []
_lent: list[tuple[torch.Tensor, Again]] | None = None  # while a call is taken down


class _Plan(NamedTuple):
    device: torch.device
    outputs: tuple[_Look, ...]
    temporaries: tuple[_Look, ...]
    offsets: tuple[int, ...]  # of the temporaries in their common allocation
    space: int  # bytes of it
    lent: tuple[Again, ...]
    constants: tuple[Any, ...]
    views: tuple[tuple[int, int, int, _Look], ...]  # where in the pool (among the constants), into which place of it, how many elements
    descriptors: tuple[tuple[int, int, Any], ...]  # where in the pool, over which place of it, like which one
    # (run, grid, what stands between stream and arguments, picks the arguments from: arguments, outputs, temporaries, lent, constants)
    launches: tuple[tuple[Any, tuple[int, int, int], Any, Callable[[Any], tuple[Any, ...]]], ...]
    single: bool  # returns a tensor, not a tuple of them


def forget() -> None:
    """Drop all plans. To be called by whoever changes something beside arguments on which launches depend."""
    for table in _tables:
        table.clear()


def lend(tensor: torch.Tensor, again: Again) -> torch.Tensor:
    """``tensor``, given to an op by something of the package that is neither argument nor ``torch.empty``; ``again`` gives it another."""
    if _lent is not None and _launch.is_noting():
        _lent.append((tensor, again))
    return tensor


def repeating(call: Callable[..., Any], beside: Callable[..., Hashable] | None = None) -> Callable[..., Any]:
    """``call``, an op's kernel on its own device, with its launches repeated from the third call that looks alike on.

    beside: called with the arguments ahead of each call. What it returns is part of the look, None for a call that is not to be
    repeated; it may raise, and do what has to be done before each launch.
    """
    plans: dict[Any, _Plan | bool] = {}  # True: seen once, False: not to be repeated
    _tables.append(plans)

    def run(*args: Any, **kwargs: Any) -> Any:
        # a part of a call that is being noted launches through Triton, or its launches would be missed
        dependent = DEPENDENT is not None and DEPENDENT()
        if not ENABLED or _launch.is_noting() or (dependent and torch.cuda.is_current_stream_capturing()):
            return call(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        addresses: list[Any] = []
        key: list[Any] = [dependent]
        if beside is not None:
            more = beside(*args, **kwargs)
            if more is None:
                return call(*args, **kwargs)
            key.append(more)
        for value in args if not kwargs else (*args, *kwargs, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                address = value.data_ptr()
                key += (value.shape, value.stride(), value.dtype, value.get_device(), address % _ALIGNMENT)
                tensors.append(value)
                addresses.append(address)
            else:
                key.append(value if value or value.__class__ is not float else repr(value))  # 0.0 and -0.0 are equal, and two numbers
        look = tuple(key)
        plan = plans.get(look)
        if isinstance(plan, _Plan) and not _hooked():
            return _repeat(plan, tensors if INTERPRETED else addresses)
        # Of two arguments at one address it cannot be said which one a kernel is given: the next call may be another.
        if plan is True and len(set(addresses)) == len(addresses) and _launch.may_note():
            result, plans[look] = _take_down(call, args, kwargs, tensors)
            return result
        result = call(*args, **kwargs)
        if plan is None:
            if len(plans) >= MOST:
                plans.clear()
            plans[look] = True
        return result

    return run


def _hooked() -> bool:
    """Whether someone listens to Triton's launches: a profiler. 3.6 and later keep chains of hooks, which are empty by default."""
    if INTERPRETED:
        return False
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return (enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True))


def _repeat(plan: _Plan, pool: list[Any]) -> Any:
    device = plan.device
    if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:  # kernels are loaded into the context of one device, and
        with torch.cuda.device(device):  # counters look at whether its stream is capturing
            return _repeat(plan, pool)
    outputs = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in plan.outputs]
    if INTERPRETED:  # takes tensors
        pool += outputs
        pool += [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in plan.temporaries]
        pool += [again() for again in plan.lent]
        pool += plan.constants
        for slot, place, offset, (size, stride, _) in plan.views:
            pool[slot] = pool[place].as_strided(size, stride, pool[place].storage_offset() + offset)
        for kernel, grid, options, pick in plan.launches:
            kernel[grid](*pick(pool), **options)
    else:
        pool += [output.data_ptr() for output in outputs]
        if plan.space:
            space = torch.empty_strided((plan.space,), (1,), dtype=torch.uint8, device=device)
            base = space.data_ptr()
            pool += [base + offset for offset in plan.offsets]
        lent = [again() for again in plan.lent]  # alive until the launch
        pool += [x if isinstance(x, int) else x.data_ptr() for x in lent]
        pool += plan.constants
        for slot, place, offset, (_, _, dtype) in plan.views:
            pool[slot] = pool[place] + offset * dtype.itemsize
        for slot, place, like in plan.descriptors:
            pool[slot] = _Descriptor(pool[place], like)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for kernel, (x, y, z), fixed, pick in plan.launches:
            kernel(x, y, z, stream, *fixed, *pick(pool))
    return None if not outputs else outputs[0] if plan.single else tuple(outputs)


def _take_down(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> tuple[Any, _Plan | bool]:
    """What the call returns, and its plan; False when it is not to be repeated."""
    global _lent
    recording, notes = _launch.Recording(_empty), list[_launch.Note]()
    with _launch.noting(notes, binds=False):
        lent, _lent = list[tuple[torch.Tensor, Again]](), []
        try:
            with recording:
                result = call(*args, **kwargs)
            lent = _lent
        finally:
            _lent = None
    if recording.others or not notes:
        return result, False
    made = {x.data_ptr(): x for x in recording.made}
    returned = () if result is None else (result,) if isinstance(result, torch.Tensor) else tuple(result)
    outputs = [made.pop(x.data_ptr(), None) for x in returned]
    if any(y is None or (x.shape, x.stride(), x.dtype) != (y.shape, y.stride(), y.dtype) for x, y in zip(returned, outputs, strict=True)):
        return result, False
    inside = list(made.values())
    owners = [*tensors, *returned, *inside, *(tensor for tensor, _ in lent)]
    if any(x.data_ptr() == 0 or x.data_ptr() % _ALIGNMENT for x in owners[len(tensors) :]):
        return result, False
    places = _Places(owners, recording)
    launches = []
    for note in notes:
        launch = _planned(note, places)
        if launch is None:
            return result, False
        launches.append(launch)
    sizes = [-(-x.numel() * x.element_size() // _PIECE) * _PIECE for x in inside]
    looks = [tuple(map(_look, group)) for group in (returned, inside)]
    plan = _Plan(
        tensors[0].device, looks[0], looks[1], tuple(sum(sizes[:i]) for i in range(len(sizes))), sum(sizes),
        tuple(again for _, again in lent), tuple(places.constants), tuple(places.views), tuple(places.descriptors), tuple(launches),
        isinstance(result, torch.Tensor),
    )  # fmt: skip
    return result, plan


def _empty(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


class _Places:
    """Where the pool has what launches are given: owners, then constants, among them what is made from those before each launch.

    An owner is known by being the very tensor, or the one that a view was taken from. The address alone would not do: a view into one
    argument may start where another one does, this time.
    """

    def __init__(self, owners: list[torch.Tensor], recording: _launch.Recording) -> None:
        self._owners, self._sources = owners, recording.sources
        self._of = {id(x): place for place, x in reversed(list(enumerate(owners)))}
        start = {x.data_ptr(): place for place, x in enumerate(owners)}
        self._of |= {id(x): start[x.data_ptr()] for x in recording.made}  # one may be returned as another object
        self.constants: list[Any] = []
        self.views: list[tuple[int, int, int, _Look]] = []
        self.descriptors: list[tuple[int, int, Any]] = []

    def constant(self, value: Any) -> int:
        self.constants.append(value)
        return len(self._owners) + len(self.constants) - 1

    def tensor(self, x: torch.Tensor) -> int | None:
        source: torch.Tensor | None = x
        while source is not None and id(source) not in self._of:
            source = self._sources.get(id(source))
        if source is None or x.data_ptr() == 0:
            return None
        place = self._of[id(source)]
        owner = self._owners[place]
        if x.dtype != owner.dtype:
            return None
        offset = (x.data_ptr() - owner.data_ptr()) // x.element_size()
        if offset == 0:
            return place
        slot = self.constant(None)
        self.views.append((slot, place, offset, _look(x)))
        return slot

    def descriptor(self, like: Any) -> int | None:
        place = self.tensor(like.base)
        if place is None or INTERPRETED:
            return None
        slot = self.constant(None)
        self.descriptors.append((slot, place, _Descriptor(0, like)))  # a copy, which does not keep the memory
        return slot


def _look(x: torch.Tensor) -> _Look:
    return x.size(), x.stride(), x.dtype


def _planned(note: _launch.Note, places: _Places) -> Any:
    """The launch with its arguments as places in the pool. None: not to be repeated."""
    kernel, compiled, grid, args, options = note
    if not INTERPRETED and (kernel.pre_run_hooks or getattr(compiled, "metadata", None) is None or not _is_cuda(compiled)):
        return None
    given = _launch.in_order(kernel, args, options)
    picked: list[int] = []
    for value in given.values():
        place: int | None = None
        if isinstance(value, torch.Tensor):
            place = places.tensor(value)
        elif _is_descriptor(value):
            place = places.descriptor(value)
        elif _is_constant(value) or (isinstance(value, tuple) and all(map(_is_constant, value))):
            place = places.constant(value)
        if place is None:
            return None
        picked.append(place)
    pick = itemgetter(*picked) if len(picked) > 1 else functools.partial(_pick_one, picked[0])
    if INTERPRETED:
        return kernel, grid, {name: value for name, value in options.items() if name not in given}, pick
    return compiled.run, _launch.size_of(grid, given), _launch.after_stream(compiled), pick


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tl.dtype, tl.constexpr))


def _pick_one(place: int, pool: list[Any]) -> tuple[Any]:
    return (pool[place],)


class _Descriptor:
    """What Triton's launcher reads of a TMA descriptor, and of the tensor under it: ``like``'s, over the memory at ``address``."""

    __slots__ = ("address", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, address: int, like: Any) -> None:
        self.address = address
        self.shape, self.strides, self.padding = like.shape, like.strides, like.padding
        self.round_f32_to_tf32 = getattr(like, "round_f32_to_tf32", False)  # not in 3.6

    @property
    def base(self) -> _Descriptor:
        return self

    def data_ptr(self) -> int:
        return self.address


def _is_descriptor(value: Any) -> bool:
    """Triton's TensorDescriptor and Gluon's have no class in common."""
    return type(value).__name__ == "TensorDescriptor"


def _is_cuda(compiled: Any) -> bool:
    """Other backends' compiled kernels are called in other ways."""
    return compiled.metadata.target.backend == "cuda"
