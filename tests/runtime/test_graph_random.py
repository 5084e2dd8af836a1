"""Random steps: whatever sizes, modes and changes come, every output has the bits of the same callable not captured."""

from __future__ import annotations

import random

import graph_toys as toys
import pytest
import torch
from torch import nn

from runtime.contract import same_bits
from runtime.graphed import GraphedModule


class Decoder(nn.Module):
    """A small decoder with a cache: rows are written by slot (negative: nowhere), each sequence reads its page through a table."""

    def __init__(self, pages: int = 8, page_size: int = 4, width: int = 4) -> None:
        super().__init__()
        self.page_size = page_size
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("embedding", torch.randn(11, width))
        # the last row takes what has no slot
        self.register_buffer("cache", torch.zeros(pages * page_size + 1, width), persistent=False)

    def forward(
        self, ids: torch.Tensor, factor: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        x = self.embedding[ids]
        self.cache.index_copy_(0, torch.where(slots >= 0, slots, self.cache.shape[0] - 1), torch.where(slots[:, None] >= 0, x, 0.0))
        q = self.down(torch.relu(self.up(x)))
        out = torch.empty_like(q)
        torch.ops.toy.scale_rows_out(q, factor, out=out)
        x = x + out
        last = x[(offsets[1:] - 1).clamp(min=0)]
        return last + self.cache[table[:, 0] * self.page_size]


DYNAMIC = {"ids": {0: "tokens"}, "factor": {0: "tokens"}, "slots": {0: "tokens"}, "table": {0: "seqs"}, "offsets": {0: "seqs+1"}}


def random_step(rng: random.Random, device: torch.device) -> tuple[torch.Tensor, ...]:
    lengths = [rng.choice([1, 1, 1, 2, 5]) for _ in range(rng.randint(1, 5))]
    tokens = sum(lengths)
    slots = torch.tensor(rng.sample(range(32), tokens), device=device)  # no two rows write one slot: the order would not be fixed
    return (
        torch.randint(0, 11, (tokens,), device=device),
        torch.rand(tokens, device=device),
        slots,
        torch.tensor([[rng.randrange(8)] for _ in lengths], device=device),
        torch.tensor([0, *lengths], device=device).cumsum(0),
    )


def run(steps: int, device: torch.device, check: str, compile: dict[str, str]) -> GraphedModule:
    rng = random.Random(7)
    module = Decoder().to(device)
    pad, sizes = {"slots": -1, "offsets": "last"}, [1, 2, 3, 6, 11]
    options = {"max_tokens": 16, "capture_sizes": sizes, "max_num_seqs": 5, "check": check, "compile": compile}
    fast = toys.make(module, DYNAMIC, pad=pad, bounds={"seqs": 5}, **options)
    fast.warmup(*random_step(rng, device))
    toys.level_costs(fast)
    dispatcher, key = fast._dispatcher, next(iter(fast._steps.keys.values()))  # type: ignore[union-attr]
    assert dispatcher is not None
    for number in range(steps):
        dispatcher.mode = rng.choice(["full", "piecewise", "full", "piecewise", "eager"])
        dispatcher.changed()
        if rng.random() < 0.01:
            module.up.weight.data = torch.randn_like(module.up.weight)
        args = random_step(rng, device)
        cache = module.cache.clone()
        got = fast(*args)
        written = module.cache.clone()
        module.cache.copy_(cache)
        decision = dispatcher.decide("-", fast._binding.read(args, {}).sizes, brief=True)
        with torch.no_grad():
            if decision.mode == "eager":
                want = key.call(dict(zip(DYNAMIC, args, strict=True)))
            else:
                padded = key.captured[decision.mode, decision.size].padded
                views = key.arena.load(dict(zip(DYNAMIC, args, strict=True)), fast._binding.read(args, {}).sizes, padded)
                want = key.call(views)[: len(args[3])]
            assert same_bits(got, want), f"step {number}: {decision}"
            assert same_bits(written, module.cache), f"step {number}: {decision}"
            assert torch.allclose(got, module(*args), atol=1e-5)
    return fast


@pytest.mark.parametrize("check", ["contract", "poison"])
def test_random_steps_have_the_bits_of_the_callable_not_captured(device: torch.device, check: str) -> None:
    fast = run(150, device, check, {})
    steps = fast.stats()["steps"]
    assert all(sum(steps[mode].values()) > 10 for mode in ("full", "piecewise", "eager"))


def test_random_steps_over_traced_pieces(device: torch.device) -> None:
    run(40, device, "contract", {"split": "fx"})


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["contract", "poison"])
def test_ten_thousand_random_steps(device: torch.device, check: str) -> None:
    run(10_000, device, check, {})
