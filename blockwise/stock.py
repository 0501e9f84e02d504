"""A plan in the forward of a diffusers transformer, with no line of it changed.

Such a forward hands its blocks to the function that `enable_gradient_checkpointing` sets. Here that is the dispatcher,
which reads the plan on each block. A loop that calls the dispatcher itself follows the same plan.
"""

import contextlib

import torch
from torch import nn

from blockwise.checkpointing import gradient_checkpoint_forward, owner_of, unreached_blocks


def block_lists(transformer, **inputs):
    """Return the block lists of a diffusers transformer, `{name: number of blocks}`.

    With `inputs` its forward is run once, and the lists are those that it hands over, in that order. Without, they are
    the lists of the classes that it names in `_repeated_blocks` or `_no_split_modules`. ValueError: none are found.
    """
    classes = getattr(transformer, "_repeated_blocks", None) or getattr(transformer, "_no_split_modules", None) or ()
    order = {} if inputs else {block: 0 for block in transformer.modules() if type(block).__name__ in classes}

    def run(block, *args, **kwargs):
        order.setdefault(owner_of(block), len(order))
        with torch.no_grad():  # only inside the block: where gradients are off, a forward hands nothing over
            return block(*args, **kwargs)

    if inputs:
        with contextlib.ExitStack() as undo, torch.enable_grad():
            undo.callback(_hand_blocks_to(transformer, run))
            transformer(**inputs)
    found = {}
    for name, module in transformer.named_modules():
        is_inner = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) and not is_inner and all(b in order for b in module):
            found[name] = module
    if not found:
        reason = "its forward hands none over" if inputs else "it names no class of blocks; give inputs of its forward"
        raise ValueError(f"No block lists in a {type(transformer).__name__}: {reason}.")
    return {name: len(found[name]) for name in sorted(found, key=lambda name: order[found[name][0]])}


class InstalledPlan(contextlib.ExitStack):
    """What `install_plan` did to a transformer; `remove()`, or the end of a `with`, undoes it."""

    remove = contextlib.ExitStack.close


def install_plan(transformer, plan):
    """Put the blocks of a transformer under a `MemoryPlan`; return the `InstalledPlan`.

    ValueError: The plan has other blocks than the transformer, or there is one already. A forward with gradients
    raises a RuntimeError if it does not call each planned block through the dispatcher.
    """
    modules, planned, installed = dict(transformer.named_modules()), {}, InstalledPlan()
    for name, modes in plan.modes.items():
        blocks = modules.get(name, ())
        if len(blocks) != len(modes):
            raise ValueError(f"The plan has {len(modes)} modes for {name}, which has {len(blocks)} blocks.")
        planned |= {f"{name}.{index}": pair for index, pair in enumerate(zip(blocks, modes, strict=True))}
    if any(hasattr(block, "memory_mode") for block, _ in planned.values()):
        raise ValueError("There is a plan on these blocks; remove() it first.")

    def check(transformer, args, output):
        missing = [name for name, (block, _) in planned.items() if block in unreached_blocks]
        if missing and torch.is_grad_enabled():
            raise RuntimeError(f"The plan has no effect on {', '.join(missing)}: the forward does not hand them over.")

    installed.callback(_hand_blocks_to(transformer, _follow_plan))
    installed.callback(transformer.register_forward_hook(check).remove)
    for block, mode in planned.values():
        block.memory_mode = mode
        unreached_blocks.add(block)
        installed.callback(unreached_blocks.discard, block)
        installed.callback(delattr, block, "memory_mode")
    return installed


def _follow_plan(block, *args, **kwargs):
    return gradient_checkpoint_forward(block, False, False, *args, **kwargs)


def _hand_blocks_to(transformer, function):
    """Let a forward hand its blocks to `function`, if it can; return what undoes it."""
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    before = [(module, {n: vars(module)[n] for n in names if n in vars(module)}) for module in transformer.modules()]
    if getattr(transformer, "_supports_gradient_checkpointing", False):
        transformer.enable_gradient_checkpointing(function)

    def undo():
        for module, values in before:
            for name in names:
                vars(module).pop(name, None)
            vars(module).update(values)

    return undo
