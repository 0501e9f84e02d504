"""Optimizers by name or import path, and fp32 master copies of bf16 weights."""

import importlib
import json

import torch
from diffusers.optimization import get_scheduler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from runtime.errors import RefusedError
from training.module import trainable_parameters


_PATHS = {
    "adamw": "torch.optim.AdamW",
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit",
    "adafactor": "transformers.optimization.Adafactor",
    "prodigy": "prodigyopt.Prodigy",
}


def find_optimizer(args, device):
    """Return the optimizer class that the flags name and its arguments, checked before anything is loaded.

    Args:
        args (`argparse.Namespace`):
            With `optimizer`, `optimizer_args`, `learning_rate` and `weight_decay` (None: the default of the class).
        device (`torch.device`): Where the run trains.

    Raises:
        RefusedError: The class cannot be imported, or does not work with the flags.
    """
    path = _PATHS.get(args.optimizer, args.optimizer)
    module, _, name = path.rpartition(".")
    try:
        optimizer_class = getattr(importlib.import_module(module), name)
        if not issubclass(optimizer_class, torch.optim.Optimizer):
            raise TypeError("it is not a torch optimizer class")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        hint = f"run pip install {path.partition('.')[0]}" if args.optimizer in _PATHS else "give the path of a class"
        raise RefusedError(f"--optimizer {args.optimizer}: cannot import {path} ({error}); {hint}.") from None
    if args.optimizer == "adamw" and device.type != "cpu" and "foreach" not in args.optimizer_args:
        args.optimizer_args.setdefault("fused", True)  # the default there needs 4 more bytes per weight for a moment
    if not args.optimizer_args.keys().isdisjoint(("lr", "weight_decay")):
        raise RefusedError("--optimizer_args: give lr by --learning_rate and weight_decay by --weight_decay.")
    arguments = {"lr": args.learning_rate}
    if args.weight_decay is not None:
        arguments["weight_decay"] = args.weight_decay
    if args.optimizer == "adafactor":
        # The rate as it is given. Relative to the size of a weight it would not move a LoRA's B, which starts at zero.
        arguments |= {"scale_parameter": False, "relative_step": False}
    arguments |= args.optimizer_args
    _try_optimizer(args, optimizer_class, arguments, device)
    return optimizer_class, arguments


def _try_optimizer(args, optimizer_class, arguments, device):
    """Make one step of the optimizer and its schedule on a small weight, so that bad values are refused now."""
    weight = torch.nn.Parameter(torch.ones(4, 4, device=device))
    weight.grad = torch.ones_like(weight)
    try:
        json.dumps(args.optimizer_args)  # as run.json will have them
        optimizer = optimizer_class([weight], **arguments)
        schedule = make_schedule(args, optimizer, num_steps=10**9)
        optimizer.step()
        schedule.step()
    except Exception as error:  # each class has errors of its own for bad values
        given = f"--learning_rate {args.learning_rate}, --weight_decay {args.weight_decay}, --lr_scheduler "
        given += f"{args.lr_scheduler} and --optimizer_args {args.optimizer_args}"
        raise RefusedError(f"--optimizer {args.optimizer} does not work with {given}: {error!r}.") from None


def make_schedule(args, optimizer, num_steps):
    """Return the schedule of the learning rate that the flags ask for, as a `LambdaLR` over `num_steps` steps."""
    how = {"num_warmup_steps": args.lr_warmup_steps, "num_training_steps": num_steps}
    how |= {"num_cycles": args.lr_num_cycles, "power": args.lr_power}
    return get_scheduler(args.lr_scheduler, optimizer, **how)


def prepare_training(accelerator, module, args, optimizer, last_step):
    """Prepare what trains `module`. Its fp32 masters are made after Accelerate has placed, and maybe sharded, it.

    Args:
        accelerator (`Accelerator`)
        module (`nn.Module`): What requires a gradient is trained.
        args (`argparse.Namespace`)
        optimizer (`tuple[type, dict]`): Class and arguments, from `find_optimizer`.
        last_step (`int`): The optimizer step at which the schedule ends.

    Returns:
        `tuple` of the prepared module, the prepared optimizer, the schedule and the `MasterWeights`.
    """
    optimizer_class, arguments = optimizer
    if uses_deepspeed(accelerator):
        # Its engine takes both together, and keeps fp32 copies itself where they are needed.
        optimizer = optimizer_class(trainable_parameters(module).values(), **arguments)
        model, prepared_optimizer = accelerator.prepare(module, optimizer)
        weights = MasterWeights(model)
    else:
        model = accelerator.prepare(module)
        weights = MasterWeights(model)
        optimizer = optimizer_class(weights.masters, **arguments)
        prepared_optimizer = accelerator.prepare(optimizer)
    # The schedule is not prepared: Accelerate would step it once per process.
    return model, prepared_optimizer, make_schedule(args, optimizer, last_step), weights


def uses_deepspeed(accelerator):
    """Return whether DeepSpeed's engine trains."""
    return accelerator.distributed_type.value == "DEEPSPEED"


class MasterWeights:
    """fp32 copies of trainable parameters that are kept in bf16 for the computation.

    bf16 has 8 significant bits: an update of less than 1/512 of a weight would be rounded away, which at usual
    learning rates is all of them. So the optimizer works on fp32 copies, and the model gets them rounded. Where the
    parameters are fp32 already they are their own masters, and nothing is copied. DDP averages the sums of the masters
    then, where it would average gradients in bf16 of the last micro-batch.

    Args:
        model (`nn.Module`): As `accelerator.prepare` returned it: what is sharded has masters of its shards.

    Attributes:
        parameters (`dict[str, nn.Parameter]`): What is trained, by its name in the module that was prepared.
        masters (`list[torch.Tensor]`): In the same order.
    """

    def __init__(self, model):
        self.parameters = trainable_parameters(getattr(model, "module", model))  # DDP and DeepSpeed wrap it
        self.masters = [
            p if p.dtype == torch.float32 else p.detach().to(torch.float32, copy=True).requires_grad_()
            for p in self.parameters.values()
        ]
        self._pairs = [(p, m) for p, m in zip(self.parameters.values(), self.masters, strict=True) if p is not m]
        self._are_averaged = False  # by DDP, in the current backward pass
        if self._pairs and isinstance(model, DistributedDataParallel):
            model.register_comm_hook(dict(self._pairs), self._average)

    def named_masters(self):
        """Yield the masters with the names of their parameters."""
        return zip(self.parameters, self.masters, strict=True)

    def take_gradients(self):
        """Move the gradients of the parameters to their masters, adding them up."""
        for parameter, master in self._pairs:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and not self._are_averaged:
                gradient = gradient.to(torch.float32)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        self._are_averaged = False

    @torch.no_grad()
    def _average(self, masters, bucket):
        """Average a bucket of DDP during the backward pass: one communication, of fp32 sums."""
        parameters = bucket.parameters()
        if parameters[0] not in masters:  # in fp32, as all of this bucket
            return allreduce_hook(None, bucket)
        self._are_averaged = True
        sums = torch.empty(sum(p.numel() for p in parameters), dtype=torch.float32, device=parameters[0].device)
        parts = sums.split([parameter.numel() for parameter in parameters])
        for parameter, gradient, part in zip(parameters, bucket.gradients(), parts, strict=True):
            master, part = masters[parameter], part.view(parameter.shape)
            part.copy_(gradient)
            if master.grad is not None:
                part.add_(master.grad)
            master.grad = part
        sums.div_(torch.distributed.get_world_size())
        buffer, work = bucket.buffer(), torch.distributed.all_reduce(sums, async_op=True)
        # DDP waits for it; what it then has of this bucket is not used.
        return work.get_future().then(lambda _: buffer)

    @torch.no_grad()
    def write_back(self):
        """Round the masters into the parameters."""
        for parameter, master in self._pairs:
            parameter.copy_(master)
