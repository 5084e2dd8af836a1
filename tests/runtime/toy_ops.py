"""A user's own splitting ops for the tests of the splitter and the backend."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("toysplit", "DEF")


def _define(schema: str, kernel, fake) -> None:
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"toysplit::{name}", fake, lib=_LIBRARY)


def _attend(q, k, v, scale, out):
    out.copy_((q * k.cumsum(0) * scale).sin() + v)  # row i depends on rows 0 to i


def _pair(q, k):
    return q * k, (q * k).sum(-1)


def _write(k, cache, slots):
    kept = slots >= 0
    cache.view(-1, cache.shape[-1])[slots[kept]] = k[kept]


# writes into out: the contract of a splitting op
_define("attend_out(Tensor q, Tensor k, Tensor v, SymInt scale, Tensor(a!) out) -> ()", _attend, lambda *a: None)
# several outputs, freshly allocated
_define("pair(Tensor q, Tensor k) -> (Tensor, Tensor)", _pair, lambda q, k: (torch.empty_like(q), q.new_empty(q.shape[:-1])))
# one fresh output
_define("mix(Tensor x) -> Tensor", lambda x: x.flip(0) + 1, lambda x: torch.empty_like(x))
# writes a cache in place
_define("write(Tensor k, Tensor(a!) cache, Tensor slots) -> ()", _write, lambda k, cache, slots: None)
_define("never(Tensor x) -> Tensor", lambda x: x.clone(), lambda x: torch.empty_like(x))
# no output and no declared mutation: only its effect matters
LOG: list[int] = []
_define("log(Tensor x) -> ()", lambda x: LOG.append(len(x)), lambda x: None)

ops = torch.ops.toysplit


class Layer(torch.nn.Module):
    """x + project(attend(split(qkv(x)))): the shape of a transformer layer, cut at ``attend_out``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.project = torch.nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, scale: int) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        out = torch.empty_like(q)
        ops.attend_out(q, k, v, scale, out)
        return x + torch.nn.functional.silu(self.project(out.view(x.shape)))


class Stack(torch.nn.Module):
    def __init__(self, layers: int = 2, width: int = 8) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, width)
        self.register_buffer("table", torch.randn(64, width))
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, *, scale: int = 1) -> torch.Tensor:
        x = self.embed(ids) + self.table[positions]
        for layer in self.layers:
            x = layer(x, scale)
        return x


def step(tokens: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 16, (tokens,), device=device), torch.arange(tokens, device=device) % 64


DYNAMIC = {"ids": 0, "positions": 0}
