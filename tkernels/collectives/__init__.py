"""Collectives between the GPUs of one host, safe to capture in CUDA graphs. docs/collectives.md explains the protocol."""

from tkernels.collectives.group import check, describe_group, destroy_group, init_group
from tkernels.collectives.norm import all_reduce_add_rms_norm
from tkernels.collectives.ops import all_gather, all_reduce, reduce_scatter
from tkernels.collectives.symm import CollectiveError

__all__ = [
    "CollectiveError",
    "all_gather",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "check",
    "describe_group",
    "destroy_group",
    "init_group",
    "reduce_scatter",
]
