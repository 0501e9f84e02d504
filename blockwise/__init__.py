"""Decide block by block where the activations of a model live: kept, recomputed, or parked in host memory.

Needs torch alone. What a name needs is imported when the name is first used.
"""

import importlib


_NAMES = {
    "checkpointing": ("configure_deepspeed_checkpointing", "gradient_checkpoint_forward"),
    "estimate": ("StepProfile", "fake_tensors", "optimizer_bytes", "shrink"),
    "log": ("MemoryLog", "OutOfMemory"),
    "offload": ("counters", "reset_counters", "set_limit"),
    "plan": ("BudgetError", "Cost", "MemoryPlan", "Mode"),
    "stock": ("block_lists", "install_plan"),
    "tracking": ("LiveBytes",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
