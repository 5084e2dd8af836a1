"""Toy modules and splitting ops for the tests of the graph runtime. The ops are a user's own, not ours."""

from __future__ import annotations

import torch
from torch import nn

from runtime.graph import AS_IS, Within
from runtime.graphed import GraphedModule, graphed

BACKENDS = [{}, {"split": "fx"}]  # of [compile]: with each, the pieces are cut another way
_LIBRARY = torch.library.Library("toy", "FRAGMENT")
_LIBRARY.define("scale_rows_out(Tensor x, Tensor factor, *, Tensor(a!) out) -> ()")
_LIBRARY.define("scale_rows(Tensor x, Tensor factor) -> Tensor")
_LIBRARY.define("scale_first_rows_out(Tensor x, Tensor count, *, Tensor(a!) out) -> ()")


def _scale_rows_out(x: torch.Tensor, factor: torch.Tensor, *, out: torch.Tensor) -> None:
    out.copy_(x * factor[:, None])


def _scale_first_rows_out(x: torch.Tensor, count: torch.Tensor, *, out: torch.Tensor) -> None:
    """Writes only the first ``count`` rows, as an attention kernel leaves padding rows alone."""
    n = int(count)
    out[:n] = x[:n] * 2


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("scale_rows_out", _scale_rows_out, _key)
    _LIBRARY.impl("scale_rows", lambda x, factor: x * factor[:, None], _key)
    _LIBRARY.impl("scale_first_rows_out", _scale_first_rows_out, _key)
torch.library.register_fake("toy::scale_rows_out", lambda x, factor, *, out: None, lib=_LIBRARY)
torch.library.register_fake("toy::scale_rows", lambda x, factor: torch.empty_like(x), lib=_LIBRARY)
torch.library.register_fake("toy::scale_first_rows_out", lambda x, count, *, out: None, lib=_LIBRARY)

SPLIT = "toy::scale_rows_out"
OUT = torch.ops.toy.scale_rows_out.default
FRESH = torch.ops.toy.scale_rows.default


class Layers(nn.Module):
    """Embedding, then layers of linear, splitting op, residual. ids [tokens] int64, factor [tokens] float -> x [tokens, 4]."""

    def __init__(self, layers: int = 2, fresh: bool = False) -> None:
        super().__init__()
        self.fresh = fresh
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.register_buffer("table", torch.randn(7, 4))

    def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        x = self.table[ids]
        for linear in self.linears:
            q = linear(x)
            if self.fresh:
                out = torch.ops.toy.scale_rows(q, factor)
            else:
                out = torch.empty_like(q)
                torch.ops.toy.scale_rows_out(q, factor, out=out)
            x = x + out.tanh()
        return x


def step(tokens: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 7, (tokens,), device=device), torch.rand(tokens, device=device)


def make(module: nn.Module, dynamic: object = None, *, pad: object = None, bounds: object = None, compile: object = None,
         max_num_seqs: int = 2, static: tuple[str, ...] = (), borrow: bool | tuple[int, ...] = False,
         within: Within = AS_IS, **graph: object) -> GraphedModule:  # fmt: skip
    """``graphed`` with small sizes, no compiler, and the toy's splitting op."""
    config = {
        "graph": {"max_tokens": 8, "capture_sizes": [2, 4], **graph},
        "compile": {"backend": "eager", "splitting_ops": [SPLIT], **(compile or {})},
        "scheduler": {"max_num_seqs": max_num_seqs},
    }
    settings = {"dynamic": dynamic or {"ids": 0, "factor": 0}, "pad": pad or {}, "bounds": bounds or {}}
    return graphed(module, config, **settings, static=static, borrow=borrow, within=within)  # type: ignore[arg-type]


def level_costs(fast: GraphedModule) -> GraphedModule:
    """Costs that grow with the size, so that picks do not depend on how busy the machine was."""
    dispatcher = fast._dispatcher
    assert dispatcher is not None
    dispatcher.table.ms = {(key, mode, size): size + (mode != "full") for key, mode, size in dispatcher.table.ms}
    dispatcher.changed()
    return fast


class Cache(nn.Module):
    """Writes x to the cache's pages by slot (negative: nowhere) and reads each sequence's first page back through a table."""

    def __init__(self, pages: int = 6, page_size: int = 2) -> None:
        super().__init__()
        self.page_size = page_size
        self.register_buffer("pages", torch.zeros(pages, page_size), persistent=False)

    def forward(self, x: torch.Tensor, slots: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        flat = self.pages.view(-1)
        old = flat.gather(0, slots.clamp(min=0))
        keep = slots >= 0
        # every row writes: a row without a slot writes what its place holds already, the last real write wins by being last
        order = torch.argsort(keep.int(), stable=True)
        flat.scatter_(0, slots.clamp(min=0)[order], torch.where(keep, x, old)[order])
        return self.pages[table[:, 0].long()].sum(1) + x[: table.shape[0]]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=1e-5)


def served(fast: GraphedModule, mode: str) -> int:
    return sum(fast.stats()["steps"][mode].values())
