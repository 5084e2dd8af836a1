"""Kernels for transformers models: ``report = tkernels.hf.patch(model)``, ``report.undo()``.

Needs transformers 5 (``pip install tkernels[hf]``); nothing else in the package imports it.
"""

from tkernels.hf.attention import ATTENTION
from tkernels.hf.patch import patch
from tkernels.hf.report import Left, PatchReport, Replaced

__all__ = ["ATTENTION", "Left", "PatchReport", "Replaced", "patch"]
