"""Step inputs at fixed addresses, with tails that hold exactly the declared padding."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import staging
from runtime.arena import Arena
from runtime.inputs import Dim, InputSpec

T, S = Dim("tokens"), Dim("seqs")
SPECS = [
    InputSpec("ids", (T,), torch.int64),
    InputSpec("slots", (T,), torch.int64, -1),
    InputSpec("table", (S, 5), torch.int32),
    InputSpec("offsets", (Dim("seqs", 1),), torch.int32, "last"),
    InputSpec("hidden", (T, 3), torch.bfloat16, 0.5),
    InputSpec("angles", (2, T), torch.float32),
    InputSpec("flags", (T,), torch.bool, True),
    InputSpec("scale", (), torch.float32),
]


def arena(device: torch.device, ring: int = 2) -> Arena:
    """ring: staging buffers; few, so that each comes round again soon."""
    with mock.patch.object(staging, "_RING", ring):
        return Arena(SPECS, {"tokens": 16, "seqs": 8}, device)


def values(tokens: int, seqs: int) -> dict[str, torch.Tensor]:
    return {
        "ids": torch.randint(1, 9, (tokens,)),
        "slots": torch.randint(1, 9, (tokens,)),
        "table": torch.randint(1, 9, (seqs, 5), dtype=torch.int32),
        "offsets": torch.arange(seqs + 1, dtype=torch.int32) * 3,
        "hidden": torch.randn(tokens, 3).bfloat16(),
        "angles": torch.randn(2, tokens),
        "flags": torch.rand(tokens) > 0.5,
        "scale": torch.tensor(2.5),
    }


def expect(views: dict[str, torch.Tensor], given: dict[str, torch.Tensor], tokens: int, seqs: int) -> None:
    """Real rows are the given ones and every tail row is the declared value; nothing is compared with the arena's own code."""
    got = {name: view.cpu() for name, view in views.items()}
    for name, value in given.items():
        real = got[name][tuple(slice(n) for n in value.shape)] if value.ndim else got[name]
        assert torch.equal(real, value), name
    assert (got["ids"][tokens:] == 0).all() and (got["slots"][tokens:] == -1).all()
    assert (got["table"][seqs:] == 0).all() and (got["offsets"][seqs + 1 :] == given["offsets"][-1]).all()
    assert (got["hidden"][tokens:] == 0.5).all() and (got["angles"][:, tokens:] == 0).all() and got["flags"][tokens:].all()


SIZES = st.tuples(st.integers(1, 16), st.integers(1, 8), st.integers(0, 15), st.integers(0, 7), st.booleans())


@settings(max_examples=40, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=6))
def test_tails_hold_the_padding_whatever_came_before(steps: list[tuple[int, int, int, int, bool]]) -> None:
    """Steps of any sizes in any order, filled from tensors or from the host."""
    a = arena(torch.device("cpu"))
    for padded_tokens, padded_seqs, tokens, seqs, from_host in steps:
        padded = {"tokens": padded_tokens, "seqs": padded_seqs}
        real = {"tokens": 1 + tokens % padded_tokens, "seqs": 1 + seqs % padded_seqs}
        given = values(real["tokens"], real["seqs"])
        if from_host:
            for name, array in a.host(real, padded).items():
                source = given[name].view(torch.uint16) if given[name].dtype is torch.bfloat16 else given[name]
                array[...] = source.numpy()
            views = a.upload(real, padded)
        else:
            views = a.load(given, real, padded)
        expect(views, given, real["tokens"], real["seqs"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([(1, 1), (2, 2), (5, 3), (6, 4)]), st.booleans()), min_size=4, max_size=12))
def test_tails_that_a_staging_buffer_holds_already_are_the_padding(steps: list[tuple[tuple[int, int], bool]]) -> None:
    """A buffer that had the same sizes before is not filled again, unless other arrays were handed out of it since, written and dropped."""
    a = arena(torch.device("cpu"))
    padded = {"tokens": 6, "seqs": 4}
    for (tokens, seqs), is_dropped in steps:
        real, given = {"tokens": tokens, "seqs": seqs}, values(tokens, seqs)
        for name, array in a.host(real, padded).items():
            array[...] = (given[name].view(torch.uint16) if given[name].dtype is torch.bfloat16 else given[name]).numpy()
        if not is_dropped:
            expect(a.upload(real, padded), given, tokens, seqs)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_inputs_are_staged_as_their_bits(device: torch.device, dtype: torch.dtype) -> None:
    """E.g. quantised queries as an argument of the step; numpy has no such dtype."""
    a = Arena([InputSpec("q", (T, 3), dtype, 0.5), InputSpec("scale", (), dtype)], {"tokens": 4}, device)
    real, padded = {"tokens": 2}, {"tokens": 3}
    given = {"q": torch.randn(2, 3).to(dtype), "scale": torch.tensor(1.5).to(dtype)}
    arrays = a.host(real, padded)
    for name, array in arrays.items():
        assert array.dtype == np.uint8
        array[...] = given[name].view(torch.uint8).numpy()
    written = a.as_tensors(arrays)
    for views in (a.upload(real, padded), a.load(given, real, padded)):
        assert views["q"].dtype == written["q"].dtype == dtype and views["q"].shape == (3, 3)
        assert torch.equal(views["q"][:2].cpu().float(), given["q"].float()) and (views["q"][2:].float() == 0.5).all()
        assert float(views["scale"]) == float(written["scale"]) == 1.5
    assert torch.equal(written["q"].float(), given["q"].float())
    a.poison_tails(real, padded)
    assert views["q"].float().isnan().sum(1).tolist() == [0, 0, 3]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_buffer_is_written_again_only_after_its_copy(size: int) -> None:
    """RACE: an event covers all copies before it, so two of them are enough for a ring; here it is seen who was waited for when."""
    sent, done = [-1] * size, -1

    class Event:
        upto = -1

        def record(self, stream: object) -> None:
            self.upto = step

        def synchronize(self) -> None:
            nonlocal done
            done = max(done, self.upto)

    events, waits = [Event(), Event()], 0
    ring = staging.Ring(size, events)
    for step in range(5 * size + 3):
        before = done
        ring.wait()
        ring.wait()  # handed out twice: nothing more to wait for
        assert sent[ring.turn] <= done, "the device may still be reading it"
        waits += done != before
        sent[ring.turn] = step
        ring.sent(None)
    assert waits <= 2 * (5 + 1) and ring.turn == (5 * size + 3) % size


def test_addresses_never_change(device: torch.device) -> None:
    a = arena(device)
    before = {name: v.data_ptr() for name, v in a.views({"tokens": 16, "seqs": 8}).items()}
    for tokens, seqs in ((1, 1), (16, 8), (3, 2)):
        sizes = {"tokens": tokens, "seqs": seqs}
        assert {name: v.data_ptr() for name, v in a.load(values(tokens, seqs), sizes, sizes).items()} == before
        assert all(v.is_contiguous() for v in a.views(sizes).values())


def test_inputs_are_aligned_for_vector_loads(device: torch.device) -> None:
    assert all(v.data_ptr() % 16 == 0 for v in arena(device).views({"tokens": 3, "seqs": 2}).values())


def test_a_step_of_the_same_size_fills_nothing(device: torch.device) -> None:
    """Of tensors on the arena's own device: the packed copy of host tensors carries the tails with it."""
    a = arena(device)
    real, padded = {"tokens": 3, "seqs": 2}, {"tokens": 8, "seqs": 4}
    on_device = lambda given: {name: value.to(device) for name, value in given.items()}
    a.load(on_device(values(3, 2)), real, padded)
    a.views(padded)["ids"][3:] = 77  # somebody breaks in: the next load trusts that the tail is as it left it ...
    a.load(on_device(values(3, 2)), real, padded)
    assert (a.views(padded)["ids"][3:] == 77).all()
    a.touched(["ids"])  # ... until it is told
    given = values(3, 2)
    expect(a.load(on_device(given), real, padded), given, 3, 2)


def test_the_arenas_own_memory_is_taken_without_a_copy(device: torch.device) -> None:
    a = arena(device)
    sizes, padded = {"tokens": 5, "seqs": 2}, {"tokens": 8, "seqs": 4}
    given = values(5, 2)
    own = a.load(given, sizes, sizes)
    views = a.load(own, sizes, padded)  # angles are laid out anew for 8 columns, the others lie where they lay
    expect(views, given, 5, 2)


def test_poison_reaches_float_tails_only(device: torch.device) -> None:
    a = arena(device)
    real, padded = {"tokens": 3, "seqs": 2}, {"tokens": 8, "seqs": 4}
    given = values(3, 2)
    views = a.load(given, real, padded)
    a.poison_tails(real, padded)
    assert views["hidden"][3:].isnan().all() and views["angles"][:, 3:].isnan().all()
    assert not views["hidden"][:3].isnan().any() and (views["slots"][3:] == -1).all()
    given = values(3, 2)
    expect(a.load(given, real, padded), given, 3, 2)


def test_above_the_largest_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens: 17 is above the arena's largest, 16"):
        arena(torch.device("cpu")).views({"tokens": 17, "seqs": 1})


def test_unknown_size_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"largest value of \['seqs'\]"):
        Arena(SPECS, {"tokens": 16}, torch.device("cpu"))


@pytest.mark.parametrize("text", ["", "3", "seqs+", "seqs+x", "a b"])
def test_bad_size_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size name"):
        Dim.parse(text)


def test_buffers_made_in_inference_mode_can_be_filled_outside_it() -> None:
    with torch.inference_mode():
        a = arena(torch.device("cpu"))
        a.views({"tokens": 4, "seqs": 2})
    sizes = {"tokens": 4, "seqs": 2}
    given = values(4, 2)
    expect(a.load(given, sizes, sizes), given, 4, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("ring", [2, 8])
def test_one_copy_for_all_inputs_and_no_overwriting_of_a_copy_under_way(device: torch.device, ring: int) -> None:
    """RACE: the host writes step n+1 while the device has not yet run the copy of step n."""
    a = arena(device, ring)
    sizes = {"tokens": 16, "seqs": 8}
    seen = []
    for step in range(20):
        torch.cuda._sleep(20_000_000)  # the stream is busy: copies queue up behind it
        arrays = a.host(sizes, sizes)
        for name, value in values(16, 8).items():
            arrays[name][...] = value.view(torch.uint16).numpy() if value.dtype is torch.bfloat16 else value.numpy()
        arrays["ids"][:] = np.arange(16) + step * 100
        seen.append(a.upload(sizes, sizes)["ids"].clone())
    for step, ids in enumerate(seen):
        assert ids.tolist() == list(range(step * 100, step * 100 + 16))


@pytest.mark.gpu
def test_host_tensors_are_packed_into_one_copy(device: torch.device) -> None:
    a, sizes = arena(device), {"tokens": 8, "seqs": 4}
    given = values(8, 4)
    a.load(given, sizes, sizes)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        views = a.load(given, sizes, sizes)
        torch.cuda.synchronize()
    copies = [e for e in profile.events() if "Memcpy HtoD" in e.name]
    assert len(copies) == 1
    expect(views, given, 8, 4)
