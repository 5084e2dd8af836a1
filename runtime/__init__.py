"""Graph-aware runtime: captured steps for any module, a paged KV cache, a continuous-batching scheduler, an engine.

Importing it also makes ``torch.compile(module, backend="tkernels")`` known where the package is not installed.
"""

import os
import sys

if sys.argv[:1] == ["-m"]:  # `python -m runtime`, before torch reads this: threads of a CPU step that spin while other programs run
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # make it many times slower; asleep they cost nothing on idle cores

from runtime.answer import Completion, Event
from runtime.backend import tkernels_backend
from runtime.config import ConfigError, RuntimeConfig
from runtime.dispatch import Decision
from runtime.engine import Engine
from runtime.graph import CaptureError
from runtime.graphed import GraphedModule, graphed
from runtime.plan import Plan
from runtime.request import RequestError, SamplingParams

__all__ = [
    "CaptureError",
    "Completion",
    "ConfigError",
    "Decision",
    "Engine",
    "Event",
    "GraphedModule",
    "Plan",
    "RequestError",
    "RuntimeConfig",
    "SamplingParams",
    "graphed",
    "tkernels_backend",
]
