"""Whether padding is harmless for a key's steps: what they write, whether padding rows change real ones, whether the number of rows does.

Found out once for each key and start; where it is not harmless, graphs serve exactly their own size.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.contract import Inputs, differs_from_module, kept, moderate, roundings_of, rows_mix, written_state
from runtime.key_steps import KeySteps
from runtime.steps import Steps


def find_written(steps: Steps, key: KeySteps, size: int) -> None:
    """Fill ``key.written``. Runs the module once, on a representative step, where no earlier start has done it."""
    state = steps.persistent.tensors() | key.static
    if key.facts_date:
        key.written = {name: state[name] for name in key.written if name in state}  # they may have moved since
        return
    given = steps.inputs(key, size)[0]
    with kept(state):
        key.written = written_state(key.module_call, given, key.arena, state)


def check_padding(steps: Steps, key: KeySteps, sizes: Iterable[int]) -> None:
    """Find out whether padding changes real rows; if so, the key is served at exact sizes only. Once for each key.

    sizes: those to capture; the padding is shaken at a small one, but with a few real rows.
    """
    if key.checked:
        return
    sizes = sorted(sizes)
    given = _with_tail(steps, key, next((size for size in sizes if size >= 8), sizes[-1]))
    if given is None and not key.follows_size:
        return
    key.checked = True
    if why := key.follows_size or _shaken(steps, key, given):
        steps.serve_exact(key, why)


def check_rows(steps: Steps, key: KeySteps) -> None:
    """A module may branch on the number of its rows: compare the padded step of each captured size with the module at the fewest
    rows that it serves. Once for each size."""
    sizes = sorted({size for _, size in key.captured})
    for smaller, size in zip([0, *sizes], sizes, strict=False):
        if size in key.rows_checked or key.exact:
            continue
        key.rows_checked.add(size)
        for n in dict.fromkeys((smaller + 1, 1)):
            call = key.proving(n) if n < size and not key.exact and (n, size) not in key.compared else None
            if call is not None:
                key.compared.add((n, size))
                given = steps.padded_to(key, call, size)
                if why := _differs(steps, key, given):
                    steps.serve_exact(key, f"{n} padded to {size}: {why}")


def _with_tail(steps: Steps, key: KeySteps, size: int) -> Inputs | None:
    padded = [given for given in steps.inputs(key, size) if dict(given.real) != dict(given.padded)]
    return padded[-1] if padded else None


def _shaken(steps: Steps, key: KeySteps, given: Inputs | None) -> str:
    if given is None:
        return ""
    large = sorted(set(key.written) - set(moderate(key.written)))
    why = _differs(steps, key, given)
    if large and not steps.pad:
        steps.remark(
            f"padding was not shaken: the step writes {large[0]}, which is too large to be put back, and no padding value is declared "
            "that keeps padding rows from writing"
        )
        return why
    with kept(key.written):
        return why or rows_mix(key.call, key.module_call, given, key.arena, key.dims, steps.pad)


def _differs(steps: Steps, key: KeySteps, given: Inputs) -> str:
    roundings = roundings_of(steps.module)
    return differs_from_module(key.call, key.module_call, given, key.arena, key.dims, key.written, roundings)
