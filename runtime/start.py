"""What a graphed module begins with: costs and proofs that earlier starts have left in files, and the sizes to capture."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from runtime import sizes as sizing
from runtime.measure import CostTable, fingerprint
from runtime.proofs import Proofs, file_beside, rests_on
from runtime.steps import Steps


def load_costs(steps: Steps) -> CostTable:
    """The costs of ``graph.cost_table`` if they hold for this module, device and versions, else none and a remark."""
    valid_for = fingerprint(steps.device, _shape_text(steps), steps.within.name)
    path = steps.config.graph.cost_table
    table, reason = CostTable.load(path, valid_for) if path else (None, "")
    if reason:
        steps.remark(reason)
    return table or CostTable(valid_for)


def _shape_text(steps: Steps) -> str:
    """Changes with everything that a measured cost depends on, apart from device and versions."""
    digest = hashlib.sha256()
    for name, t in steps.module.state_dict().items():
        digest.update(f"{name} {tuple(t.shape)} {t.dtype}".encode())
    digest.update(repr((steps.config.compile, steps.binding.dims, steps.bounds)).encode())
    return f"{type(steps.module).__name__} {digest.hexdigest()[:16]}"


def load_proofs(steps: Steps, table: CostTable) -> None:
    """What the starts before have proved. Several ranks prove everything: each would have to know that all others remember."""
    config = steps.config
    path = config.graph.cost_table
    if not path or config.parallel.tensor > 1:
        return
    settings = (config.compile, config.graph.fresh_split_outputs, steps.binding.dims, steps.pad, steps.bounds, sorted(steps.static))
    valid_for = rests_on(steps.module, table.valid_for, repr(settings))
    steps.proved = Proofs.load(file_beside(path), valid_for)
    if config.graph.check != "poison":
        steps.known = Proofs(valid_for, dict(steps.proved.steps), dict(steps.proved.keys))


def save_proofs(steps: Steps) -> None:
    path = steps.config.graph.cost_table
    if path and steps.proved.valid_for is not None:
        steps.proved.keys.update(steps.facts())
        steps.proved.save(file_beside(path))


def sizes_to_capture(steps: Steps, max_graphs: int | None = None, cost: Callable[[int], float] | None = None) -> dict[str, list[int]]:
    """mode -> sizes. cost: of a graph of a size, in ms; with it all sizes are chosen anew for the traffic."""
    graph = steps.config.graph
    lists: dict[str, list[int]] = {}
    for mode, configured in (("piecewise", graph.capture_sizes), ("full", graph.full_sizes)):
        if mode == "full" and configured == "auto":
            configured = graph.capture_sizes
        chosen, remark = sizing.capture_sizes(
            configured if cost is None else "auto", max_tokens=graph.max_tokens, max_num_seqs=steps.config.scheduler.max_num_seqs,
            max_graphs=max_graphs or graph.max_graphs, histogram=steps.traffic, cost=cost,
        )  # fmt: skip
        if remark:
            steps.remark(remark)
        if graph.mode in ("auto", mode):
            lists[mode] = chosen
    return lists
