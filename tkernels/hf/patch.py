"""``patch(model)``: put the kernels under a transformers model, on its instances alone.

Modules keep their parameters, names and hooks; only their class changes, to a subclass with another forward. The attention
implementation is a key of the model's config, and models may share one, so the patched model gets its own copy of it. Nothing global
is changed except that the name "tkernels" is registered with transformers' attention interfaces.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from transformers import PreTrainedModel

from tkernels.hf.architectures import SUPPORTED, Rule, attention_types, rules
from tkernels.hf.attention import ATTENTION
from tkernels.hf.report import Change, Left, PatchReport, Replaced

_MAX_HEAD_DIM = 256


def patch(
    model: PreTrainedModel, attention: bool = True, norm: bool = True, mlp: bool = True, rope: bool = True, linear: bool = True
) -> PatchReport:
    """Replace what this package computes faster, in this model only, for inference.

    attention: attention over the model's own caches, dynamic and static, with padding, windows, soft-cap and sinks.
    norm: RMSNorm. mlp: act(gate) · up. rope: QK-norm and rotation. linear: the projections,
        which under torch.compile stream their weights where that is faster than cuBLAS.
    Returns what was replaced, what was left and why; ``.undo()`` restores the model. A model of an unknown architecture is left alone.
    Raises TypeError if the model is not a transformers model, e.g. a wrapper around one.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a transformers PreTrainedModel, got {type(model).__module__}.{type(model).__name__}; "
            "pass the model inside a wrapper (for PEFT: model.get_base_model())"
        )
    text_config = model.config.get_text_config()
    report = PatchReport(model_type=text_config.model_type)
    if text_config.model_type not in SUPPORTED:
        why = f"unknown architecture {text_config.model_type!r}; known: {', '.join(SUPPORTED)}"
        report.left = (Left("model", (), why),)
        return report
    wanted = {"attention": attention, "norm": norm, "mlp": mlp, "rope": rope, "linear": linear}
    plan = _Plan(model, text_config, wanted)
    report.replaced, report.left = plan.replaced(), plan.left()
    try:
        for change in plan.changes():
            change.apply()
            report._changes.append(change)
    except BaseException:
        report.undo()
        raise
    report._config_before = {id(config): dict(vars(config)) for config in plan.config_copies.values()}
    for module in plan.attention_modules:
        module.__dict__["_tkernels_report"] = report
    return report


class _Plan:
    """Everything decided before anything is changed."""

    def __init__(self, model: PreTrainedModel, text_config: Any, wanted: dict[str, bool]) -> None:
        self.model, self.text_config, self.wanted = model, text_config, wanted
        self.table = rules(text_config.model_type)
        self.swaps: dict[tuple[str, str, str], list[tuple[str, torch.nn.Module, type]]] = defaultdict(list)
        self.refused: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.config_copies: dict[int, Any] = {}
        self.attention_type, _ = attention_types(text_config.model_type)
        self.attention_modules = [m for m in model.modules() if isinstance(m, self.attention_type)]
        self._decide_attention()
        for name, module in model.named_modules():
            self._decide(name, module)
        if self._rope_is_partial():
            for key in [key for key in self.swaps if key[0] == "rope"]:
                self.refused["rope", "the attention and rotary modules of a model are replaced together, and some cannot be"] += [
                    name for name, _, _ in self.swaps.pop(key)
                ]

    def _decide_attention(self) -> None:
        self.copies_config = False
        if not self.wanted["attention"]:
            return
        if not self.attention_modules:
            self.refused["attention", f"no {self.attention_type.__name__} in the model"] = []
        elif self.text_config._attn_implementation == ATTENTION:
            self.refused["attention", "already patched"] = []
        elif (head_dim := self.attention_modules[0].head_dim) > _MAX_HEAD_DIM:  # type: ignore[operator]
            self.refused["attention", f"the kernels take head dimensions up to {_MAX_HEAD_DIM}, this model has {head_dim}"] = []
        else:
            self.copies_config = True

    def _decide(self, name: str, module: torch.nn.Module) -> None:
        kind = type(module)
        rule = self.table.get(kind)
        if rule is None:
            self._report_relative(name, kind)
            return
        if not self.wanted[rule.kind] or (rule.kind == "linear" and not self._is_projection(name)):
            return
        why = self._refuse(module, rule)
        if why is None:
            self.swaps[rule.kind, kind.__name__, rule.now].append((name, module, rule.make(module)))
        else:
            self.refused[rule.kind, why].append(name)

    def _refuse(self, module: torch.nn.Module, rule: Rule) -> str | None:
        if "forward" in module.__dict__:
            return "its forward was replaced on the instance (by accelerate's hooks, say)"
        return rule.refuse(module)

    def _report_relative(self, name: str, kind: type) -> None:
        """A subclass of something we know: ours from an earlier patch, or someone's with arithmetic we do not know."""
        for base in kind.__mro__[1:]:
            rule = self.table.get(base)
            if rule is not None and self.wanted[rule.kind]:
                ours = "_tkernels_base" in kind.__dict__
                if rule.kind == "linear" and not (ours and self._is_projection(name)):
                    return  # quantised and adapted layers subclass it: theirs to compute
                self.refused[rule.kind, "already patched" if ours else f"a {kind.__name__}, which may compute something else"].append(name)
                return

    def _is_projection(self, name: str) -> bool:
        """Projections of the text model and its head; a vision tower beside it is not ours."""
        parents = [self.model.get_submodule(name.rsplit(".", level)[0]) for level in (1,) if "." in name]
        known = tuple(base for base in self.table if base is not torch.nn.Linear)
        return name == "lm_head" or any(isinstance(parent, known) for parent in parents)

    def _rope_is_partial(self) -> bool:
        """Whether some attention or rotary module of the text model would stay as it is: they hand each other the angles."""
        swapped = {id(module) for key, entries in self.swaps.items() if key[0] == "rope" for _, module, _ in entries}
        together = tuple(attention_types(self.text_config.model_type))
        return bool(swapped) and any(isinstance(module, together) and id(module) not in swapped for module in self.model.modules())

    def changes(self) -> list[Change]:
        changes = [
            Change(module, "__class__", type(module), now) for entries in self.swaps.values() for _, module, now in entries
        ]  # fmt: skip
        if self.copies_config:
            self._copy_configs()
            for module in self.model.modules():
                config = getattr(module, "config", None)
                if id(config) in self.config_copies:
                    changes.append(Change(module, "config", config, self.config_copies[id(config)]))
        return changes

    def _copy_configs(self) -> None:
        """Shallow copies of the text config and of the configs around it, which name it."""
        text = copy.copy(self.text_config)
        text._attn_implementation_internal = ATTENTION
        self.config_copies = {id(self.text_config): text}
        if self.model.config is not self.text_config:
            whole = copy.copy(self.model.config)
            for name, value in list(vars(whole).items()):
                if value is self.text_config:
                    setattr(whole, name, text)
            self.config_copies[id(self.model.config)] = whole

    def replaced(self) -> tuple[Replaced, ...]:
        found = [
            Replaced(kind, original, now, tuple(name for name, _, _ in entries)) for (kind, original, now), entries in self.swaps.items()
        ]  # fmt: skip
        if self.copies_config:
            names = tuple(name for name, module in self.model.named_modules() if isinstance(module, self.attention_type))
            before = str(self.text_config._attn_implementation)
            found.insert(0, Replaced("attention", f"{self.attention_type.__name__} ({before})", "tkernels.padded_attention", names))
        return tuple(found)

    def left(self) -> tuple[Left, ...]:
        return tuple(Left(kind, tuple(names), why) for (kind, why), names in self.refused.items())
