"""What a call of ``patch`` did to a model, and how to take it back."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

_MISSING = object()


@dataclass(frozen=True)
class Replaced:
    """Modules of one class that now compute something else."""

    kind: str  # "attention", "rope", "norm", "mlp" or "linear"
    original: str  # their class
    now: str  # what they run
    where: tuple[str, ...]  # their names in the model


@dataclass(frozen=True)
class Left:
    """Something that stayed as it was although it was asked for."""

    kind: str
    where: tuple[str, ...]  # module names; empty: the whole model
    why: str


@dataclass
class Change:
    """One reversible step: a module's class, or its config."""

    module: torch.nn.Module
    attribute: str
    before: Any
    after: Any

    def apply(self) -> None:
        setattr(self.module, self.attribute, self.after)

    def revert(self) -> bool:
        """Take it back, unless someone else has changed the same thing since."""
        if getattr(self.module, self.attribute) is not self.after:
            return False
        setattr(self.module, self.attribute, self.before)
        return True


@dataclass
class PatchReport:
    """What was replaced, what was left and why. ``print(report)`` shows it; ``undo`` restores the model."""

    model_type: str
    replaced: tuple[Replaced, ...] = ()
    left: tuple[Left, ...] = ()
    dense_attention_calls: int = 0  # attention calls whose mask was a matrix: they ran through transformers' SDPA
    _changes: list[Change] = field(default_factory=list, repr=False)
    _config_before: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)

    @property
    def active(self) -> bool:
        """Whether anything of this patch is in the model now."""
        return bool(self._changes)

    def undo(self) -> None:
        """Give every module its class and config back. Config keys that were set since ``patch`` keep their new value.

        Does nothing the second time. Raises RuntimeError, after undoing the rest, if a module was changed by someone else since.
        """
        changes, self._changes = self._changes, []
        carried: set[int] = set()
        stuck = []
        for change in reversed(changes):
            if change.attribute == "config" and id(change.after) not in carried:
                carried.add(id(change.after))
                self._carry_over(change.before, change.after)
            change.module.__dict__.pop("_tkernels_report", None)
            if not change.revert():
                stuck.append(f"{type(change.module).__name__}.{change.attribute}")
        if stuck:
            names = ", ".join(f"{name} ({count}×)" for name, count in Counter(stuck).items())
            raise RuntimeError(f"undo: left as they are, because they were changed after patch(): {names}")

    def _carry_over(self, original: Any, copy: Any) -> None:
        snapshot = self._config_before[id(copy)]
        for name, value in vars(copy).items():
            if name != "_attn_implementation_internal" and snapshot.get(name, _MISSING) is not value:
                vars(original)[name] = value

    def __str__(self) -> str:
        lines = [f"tkernels.hf.patch: {self.model_type}{'' if self.active or not self.replaced else ' (undone)'}"]
        for entry in self.replaced:
            lines.append(f"  {entry.kind:9} {len(entry.where):4} × {entry.original} → {entry.now}  at {', '.join(_patterns(entry.where))}")
        for rest in self.left:
            at = f"{len(rest.where)} × {', '.join(_patterns(rest.where))}: " if rest.where else ""
            lines.append(f"  {rest.kind:9} left: {at}{rest.why}")
        if not self.replaced:
            lines.append("  nothing was replaced")
        if self.dense_attention_calls:
            lines.append(f"  attention ran {self.dense_attention_calls} times through transformers' SDPA, because its mask was a matrix")
        return "\n".join(lines)


def _patterns(names: tuple[str, ...]) -> list[str]:
    """Names with their layer numbers replaced by a star, each pattern once."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
