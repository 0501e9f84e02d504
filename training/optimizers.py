"""Optimizers by name or import path, and fp32 master copies of bf16 weights."""

import importlib
import inspect
import json

import torch
from diffusers.optimization import get_scheduler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from runtime.errors import RefusedError


_PATHS = {
    "adamw": "torch.optim.AdamW",
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit",
    "adafactor": "transformers.optimization.Adafactor",
    "prodigy": "prodigyopt.Prodigy",
}
_PACKAGES = {"adamw_8bit": "bitsandbytes", "prodigy": "prodigyopt"}


def find_optimizer(args, device):
    """Return the optimizer class that the flags name and its arguments, checked before anything is loaded.

    Args:
        args (`argparse.Namespace`):
            With `optimizer`, `optimizer_args`, `learning_rate` and `weight_decay` (None: what the class has).
        device (`torch.device`): Where the run trains.

    Raises:
        RefusedError: The class cannot be imported, or does not take one of the arguments.
    """
    path = _PATHS.get(args.optimizer, args.optimizer)
    module, _, name = path.rpartition(".")
    try:
        optimizer_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        package = _PACKAGES.get(args.optimizer)
        hint = f"install it with: pip install {package}" if package else "give the import path of a class"
        raise RefusedError(f"--optimizer {args.optimizer}: cannot import {path} ({error}); {hint}.") from None
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise RefusedError(f"--optimizer {args.optimizer}: {path} is not a torch optimizer class.")

    arguments = {"lr": args.learning_rate}
    if args.optimizer == "adamw" and device.type != "cpu" and "foreach" not in args.optimizer_args:
        args.optimizer_args.setdefault("fused", True)  # the default there needs 4 more bytes per weight for a moment
    if args.weight_decay is not None:
        arguments["weight_decay"] = args.weight_decay
    if args.optimizer == "adafactor":
        # The rate as it is given. Relative to the size of a weight it would not move a LoRA's B, which starts at zero.
        arguments |= {"scale_parameter": False, "relative_step": False}
    flags = {"lr": "--learning_rate", "weight_decay": "--weight_decay"}
    for key, value in args.optimizer_args.items():
        if key in flags:
            raise RefusedError(f"--optimizer_args: give {key} by {flags[key]}.")
        arguments[key] = value
    # Looked at before the class is called, to name the flag that gave what it does not take.
    parameters = inspect.signature(optimizer_class).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for key in arguments:
            if key not in parameters:
                known = ", ".join(name for name in parameters if name not in ("params", "lr", "weight_decay"))
                raise RefusedError(f"{flags.get(key, '--optimizer_args')}: {path} takes no {key}; it takes {known}.")
    _try_optimizer(args, path, optimizer_class, arguments, device)
    return optimizer_class, arguments


def make_schedule(args, optimizer, num_steps):
    """Return the schedule of the learning rate that the flags ask for, as a `LambdaLR` over `num_steps` steps."""
    return get_scheduler(
        args.lr_scheduler,
        optimizer,
        num_warmup_steps=args.lr_warmup_steps,
        num_training_steps=num_steps,
        num_cycles=args.lr_num_cycles,
        power=args.lr_power,
    )


def _try_optimizer(args, path, optimizer_class, arguments, device):
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
        raise RefusedError(
            f"--optimizer {args.optimizer} ({path}) does not work with --learning_rate {args.learning_rate}, "
            f"--lr_scheduler {args.lr_scheduler} and --optimizer_args {args.optimizer_args}: "
            f"{type(error).__name__}: {str(error).rstrip('.')}."
        ) from None


class MasterWeights:
    """fp32 copies of trainable parameters that are kept in bf16 for the computation.

    bf16 has 8 significant bits: an update of less than 1/512 of a weight would be rounded away, which at usual
    learning rates is all of them. So the optimizer works on fp32 copies, and the model gets them rounded. Where the
    parameters are fp32 already they are their own masters, and nothing is copied.

    Args:
        parameters (`list[nn.Parameter]`): The trainable parameters.
    """

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.masters = [
            p if p.dtype == torch.float32 else p.detach().to(torch.float32, copy=True).requires_grad_()
            for p in self.parameters
        ]
        self._pairs = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        self._are_averaged = False  # by DDP, in the backward pass at work

    def take_gradients(self):
        """Add the gradients of the parameters, and take them away, to those of their masters."""
        for parameter, master in self._pairs:
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad, None
                if not self._are_averaged:
                    gradient = gradient.to(torch.float32)
                    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        self._are_averaged = False

    def average_in_fp32(self, model):
        """Let DDP average the sums of the masters, where it would average gradients in bf16 of the last micro-batch.

        Call it with what `accelerator.prepare` returned, before the first step.
        """
        if self._pairs and isinstance(model, DistributedDataParallel):
            model.register_comm_hook(dict(self._pairs), self._average)

    @torch.no_grad()
    def _average(self, masters, bucket):
        """Average a bucket of DDP, while the backward pass goes on: one communication, of fp32 sums."""
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
        # DDP waits for it; what it then has of this bucket is not looked at.
        return work.get_future().then(lambda _: buffer)

    @torch.no_grad()
    def write_back(self):
        """Round the masters into the parameters."""
        for parameter, master in self._pairs:
            parameter.copy_(master)
