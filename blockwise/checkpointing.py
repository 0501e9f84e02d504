"""The one dispatcher through which every block of every model is called.

`gradient_checkpoint_forward` reads like the plain call `model(*args, **kwargs)`, with two switches in front that say
where the activations of this block live: kept, recomputed, or recomputed from inputs parked in host memory. This file
is the only one that calls a `checkpoint` function of torch or DeepSpeed.
"""

import copy
import dataclasses
import sys
import weakref

import torch
from torch import nn
from torch.utils._pytree import tree_is_leaf, tree_map
from torch.utils.checkpoint import checkpoint

from blockwise import offload


# The block that ran last, for messages about memory.
last_run = {"block": lambda: None, "recomputed": False}

# Blocks with a plan that have not been called through the dispatcher yet: see `blockwise.stock`.
unreached_blocks = weakref.WeakSet()


def owner_of(model):
    """Return the block whose bound method `model` is, else `model` itself."""
    return getattr(model, "__self__", model)


def gradient_checkpoint_forward(
    model, use_gradient_checkpointing, use_gradient_checkpointing_offload, /, *args, **kwargs
):
    """Call `model(*args, **kwargs)`, its activations kept, recomputed, or recomputed from parked inputs.

    Outputs and gradients are the same bits in every mode. Where a DeepSpeed config has configured activation
    checkpointing (`configure_deepspeed_checkpointing`), DeepSpeed does the recomputation and the parking.

    Args:
        model (`nn.Module` or function):
            The block to call. A `Mode` that a plan has put on it (`blockwise.stock.install_plan`) holds in addition
            to the two switches.
        use_gradient_checkpointing (`bool`):
            Keep the arguments only, and run the block again in the backward pass. Off: a plain call.
        use_gradient_checkpointing_offload (`bool`):
            The same, with the tensors that only this block keeps alive parked in host memory meanwhile. Implies
            checkpointing.
        *args, **kwargs:
            The block's arguments. Tensors are found in them wherever they are in tuples, lists, dicts and
            dataclasses.

    Returns:
        What `model` returns, of the same structure.

    Raises:
        RuntimeError: An input was changed in place, by the block or after its call. The recomputation would start
            from other values than the forward pass did.
        TypeError: A `torch.Generator` is among the arguments of a recomputed block.
    """
    block = owner_of(model)
    last_run.update(block=weakref.ref(block), recomputed=False)
    if (mode := getattr(block, "memory_mode", None)) is not None:
        unreached_blocks.discard(block)
        use_gradient_checkpointing |= mode.activations == "recompute"
        use_gradient_checkpointing_offload |= mode.activations == "park"
    recompute = use_gradient_checkpointing or use_gradient_checkpointing_offload
    if not torch.is_grad_enabled():
        return model(*args, **kwargs)
    if not recompute:
        if offload.is_in_use():
            leaves = []
            _map_leaves(leaves.append, (args, kwargs))
            offload.keep_shared(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return model(*args, **kwargs)

    tensors, template = _take_tensors((args, kwargs))
    inputs = _InputVersions(block, tensors)
    pending = [(args, kwargs)]

    def run(*tensors):
        if pending:
            # The first run gets the caller's own containers: what a block writes into them is seen as in a plain call.
            args, kwargs = pending.pop()
        else:
            inputs.check()
            last_run.update(block=weakref.ref(block), recomputed=True)
            args, kwargs = _put_tensors(tensors, template)
        return model(*args, **kwargs)

    # The tensors go in by position and flat: neither torch nor DeepSpeed sees a tensor in a keyword or a container.
    if _deepspeed_checkpointing_is_configured():
        output = _deepspeed_checkpoint(block, run, tensors)
    elif use_gradient_checkpointing_offload:
        with offload.parked_inputs(block, tensors):
            output = checkpoint(run, *tensors, use_reentrant=False)
    else:
        offload.keep_shared(tensors)
        output = checkpoint(run, *tensors, use_reentrant=False)
    inputs.check()
    return output


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Replaces, in a template, the tensor of this index."""

    index: int


def _take_tensors(tree):
    """Return the tensors in `tree`, each once, and `tree` with a slot in place of each."""
    tensors = []

    def take(leaf):
        if isinstance(leaf, torch.Generator):
            raise TypeError("A torch.Generator in a block's arguments would draw other numbers when it is recomputed.")
        if not isinstance(leaf, torch.Tensor):
            return leaf
        for index, tensor in enumerate(tensors):
            if tensor is leaf:
                return _Slot(index)  # given twice: one tensor in the recomputation too
        tensors.append(leaf)
        return _Slot(len(tensors) - 1)

    return tensors, _map_leaves(take, tree)


def _put_tensors(tensors, template):
    return _map_leaves(lambda leaf: tensors[leaf.index] if isinstance(leaf, _Slot) else leaf, template)


def _map_leaves(function, tree):
    """Rebuild `tree` with `function` applied to each leaf of its tuples, lists, dicts and dataclasses."""
    # What nearly all arguments are goes first: torch's own walk takes ten times as long.
    if isinstance(tree, (torch.Tensor, _Slot)):
        return function(tree)
    if type(tree) in (tuple, list):
        return type(tree)([_map_leaves(function, value) for value in tree])
    if isinstance(tree, dict):  # also a subclass, which torch's own walk leaves alone
        rebuilt = copy.copy(tree)
        for key, value in tree.items():
            rebuilt[key] = _map_leaves(function, value)
        return rebuilt
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        rebuilt = copy.copy(tree)
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                # Not setattr, which a frozen dataclass refuses.
                object.__setattr__(rebuilt, field.name, _map_leaves(function, getattr(tree, field.name)))
        return rebuilt
    if tree_is_leaf(tree):
        return function(tree)
    return tree_map(lambda part: _map_leaves(function, part), tree, is_leaf=lambda part: part is not tree)


class _InputVersions:
    """Notices an in-place change of a block's inputs, without keeping their memory alive."""

    def __init__(self, model, tensors):
        self.name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", repr(model))
        self.watched = [(_version_alias(tensor), tensor._version) for tensor in tensors if not tensor.is_inference()]

    def check(self):
        for alias, version in self.watched:
            if alias._version != version:
                raise RuntimeError(
                    f"An input of {self.name} has been modified by an inplace operation, but the block is recomputed "
                    "from it: make the change out of place, or switch checkpointing off for this block."
                )


def _version_alias(tensor):
    """Return an empty tensor that shares the version counter of `tensor` but not its storage."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return tensor  # Subclasses do not take other data; they are never parked either.
    alias = tensor.detach()
    alias.data = alias.new_empty(0)
    return alias


# ---------------------------------------------------------------- DeepSpeed


def configure_deepspeed_checkpointing(
    deepspeed_config, *, use_gradient_checkpointing, use_gradient_checkpointing_offload, device
):
    """Hand the `activation_checkpointing` section of a DeepSpeed config to DeepSpeed, if there is one.

    Neither Accelerate nor the DeepSpeed engine does this. Afterwards `gradient_checkpoint_forward` goes through
    DeepSpeed. Call it once, after the process group exists and before the first step.

    Args:
        deepspeed_config (`dict`):
            The whole DeepSpeed config.
        use_gradient_checkpointing, use_gradient_checkpointing_offload (`bool`):
            The flags of this run.
        device (`torch.device`):
            Where the model runs.

    Returns:
        `bool`: Whether the config has the section, and DeepSpeed is in charge.

    Raises:
        ValueError: A key of the section is unknown or cannot work here, or contradicts the flags.
    """
    section = deepspeed_config.get("activation_checkpointing")
    if section is None:
        return False
    where = "'activation_checkpointing' in the DeepSpeed config"
    for key, value in section.items():
        if value and key != "cpu_checkpointing":  # those that are off have no effect
            raise ValueError(f"{where}: {key!r} is not supported here, only cpu_checkpointing is. Remove it.")
    parks = bool(section.get("cpu_checkpointing"))
    if not (use_gradient_checkpointing or use_gradient_checkpointing_offload):
        raise ValueError(f"{where} has no effect without --use_gradient_checkpointing. Add the flag or remove it.")
    if parks != bool(use_gradient_checkpointing_offload):
        raise ValueError(f"{where}: cpu_checkpointing is {parks}, --use_gradient_checkpointing_offload {not parks}.")
    if parks and torch.device(device).type == "cpu":
        raise ValueError(f"{where}: cpu_checkpointing cannot work on a CPU device. Set it to false.")

    import deepspeed

    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=parks)
    return True


def _deepspeed_checkpointing_is_configured():
    # Only a process that has imported DeepSpeed can have configured it; importing it here would cost seconds.
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and deepspeed.checkpointing.is_configured()


def _deepspeed_checkpoint(block, run, tensors):
    """Recompute `run(*tensors)` through DeepSpeed; return its output in its own structure."""
    # Not its reentrant form, which loses the gradients of a block whose first input needs none.
    from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint

    template, sightings = None, []

    def run_flat(*tensors, sightings=sightings):  # the graph owns this function, and so the sightings
        nonlocal template
        outputs, template = _take_tensors(run(*tensors))
        return tuple(outputs)

    # `cpu_checkpointing` empties the tensor objects that it is given. It gets aliases, so that no one else's tensor
    # changes, and those that live on anyway are marked as not to be copied.
    aliases = []
    for position, tensor in enumerate(tensors):
        sighting = offload.first_sighting(block, position, tensor)
        aliases.append(tensor.view_as(tensor))
        aliases[-1].no_checkpointing = sighting is None
        sightings.append(sighting)
    outputs = non_reentrant_checkpoint(run_flat, *aliases)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return _put_tensors(outputs, template)
