"""The module that is trained: which parameters, in which precision, and from a batch to its loss."""

import difflib
import re

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from runtime.errors import RefusedError
from training.flow_matching import add_noise, flow_losses, flow_target


ADAPTER_NAME = "default"


class DiffusionTrainingModule(nn.Module):
    """Holds the transformer; its `forward` goes from a batch to the loss.

    This is what `accelerator.prepare` gets, so that the hooks of DDP and ZeRO see every block.

    Args:
        family (`Family`): Predicts with it.
        transformer (`nn.Module`): Model of diffusers.
        loss_weighting (`str`): See `flow_losses`.

    Attributes:
        sample_losses (`torch.Tensor` of shape (B,), or None): Of the last micro-batch, to name samples by.
    """

    def __init__(self, family, transformer, *, loss_weighting="none"):
        super().__init__()
        self.family, self.transformer, self.loss_weighting = family, transformer, loss_weighting
        self.sample_losses = None

    def losses(self, batch, loss_weighting="none"):
        """Return the loss (fp32) of each sample of a micro-batch from `collate`, of shape (B,)."""
        latents, noise, sigmas = batch["latents"], batch["noise"], batch["sigmas"]
        prediction = self.family.predict(self.transformer, add_noise(latents, noise, sigmas), sigmas * 1000, batch)
        prediction, target = map(self.family.trained_part, (prediction, flow_target(latents, noise)))
        return flow_losses(prediction, target, sigmas, loss_weighting)

    def forward(self, batch):
        """Return the mean loss (a scalar, fp32) of a micro-batch from `collate`."""
        losses = self.losses(batch, self.loss_weighting)
        self.sample_losses = losses.detach()
        return losses.mean()


# ---------------------------------------------------------------- what is trained


def _is_part_of(name, modules):
    return any(name == module or name.startswith(module + ".") for module in modules)


def find_lora_targets(transformer, names, *, never_trained):
    """Return the full names of the linear layers that get an adapter.

    Args:
        transformer (`nn.Module`): May be on the meta device: only names and types are read.
        names (`list[str]`): Each a full name or the end of one, as PEFT matches them.
        never_trained (`list[str]`): Modules that the architecture gives no gradient; left out.

    Raises:
        RefusedError: A name matches nothing, or no linear layer that trains.
    """
    linears = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    trained = [name for name in linears if not _is_part_of(name, never_trained)]
    targets, problems = set(), []
    for name in names:
        matching = [full for full in trained if full == name or full.endswith("." + name)]
        targets.update(matching)
        if not matching:
            # The ends of the existing names, without the numbers of the blocks.
            ends = {re.sub(r"^.*?\.\d+\.", "", full) for full in trained}
            ends |= {end.rpartition(".")[2] for end in ends}
            near = ", ".join(difflib.get_close_matches(name, sorted(ends), n=3, cutoff=0.5) or sorted(ends)[:12])
            problems.append(f"{name!r} is no Linear layer that gets a gradient (near: {near})")
    if problems:
        raise RefusedError(f"--lora_target_modules: {'; '.join(problems)}.")
    return [name for name in trained if name in targets]


class MasterLinear(nn.Linear):
    """A linear layer with its weight in fp32 that computes in the dtype of its input.

    PEFT's own would cast the input to fp32 instead, and autograd would keep that copy of every adapter's input.
    """

    def forward(self, x):
        """Map `x` (..., in_features) to (..., out_features), in the dtype of `x`."""
        return nn.functional.linear(x, self.weight.to(x.dtype))


def add_lora(transformer, targets, args):
    """Freeze `transformer` and give the layers named in `targets` an adapter with fp32 weights.

    The adapters start equal on every process: A random from the seed, B zero.
    """
    transformer.requires_grad_(False)
    strength = {"r": args.lora_rank, "lora_alpha": args.lora_alpha, "lora_dropout": args.lora_dropout}
    transformer.add_adapter(LoraConfig(**strength, target_modules=targets), adapter_name=ADAPTER_NAME)
    torch.manual_seed(args.seed)
    for layer in lora_layers(transformer).values():
        for adapters in (layer.lora_A, layer.lora_B):
            stock = adapters[ADAPTER_NAME]
            how = {"bias": False, "dtype": torch.float32, "device": stock.weight.device}
            adapters[ADAPTER_NAME] = MasterLinear(stock.in_features, stock.out_features, **how)
        layer.cast_input_dtype_enabled = False
        # Drawn again, since PEFT drew in the dtype of the base.
        layer.reset_lora_parameters(ADAPTER_NAME, init_lora_weights=True)


def lora_layers(transformer):
    """Return the adapted layers by name."""
    return {name: module for name, module in transformer.named_modules() if isinstance(module, LoraLayer)}


def make_trainable(transformer, args, names):
    """Give the layers `names` of `transformer` an adapter, or in full training train all but the modules `names`."""
    if args.training_mode == "lora":
        add_lora(transformer, names, args)
        return
    for name, parameter in transformer.named_parameters():
        parameter.requires_grad_(not _is_part_of(name, names))


def parameters_to_train(skeleton, args, names):
    """Return what `trainable_parameters` will, before there is anything to train.

    Args:
        skeleton (`nn.Module`): The transformer on the meta device, in the dtypes that it is trained in.
        names (`list[str]`): Layers that get an adapter, or in full training modules that are not trained.

    Returns:
        `dict[str, tuple[tuple[int, ...], torch.dtype]]`: Name -> shape and dtype.
    """
    if args.training_mode == "full":
        return {
            f"transformer.{name}": (tuple(parameter.shape), parameter.dtype)
            for name, parameter in skeleton.named_parameters()
            if not _is_part_of(name, names)
        }
    parameters = {}
    for name in names:
        linear = skeleton.get_submodule(name)
        shapes = {"lora_A": (args.lora_rank, linear.in_features), "lora_B": (linear.out_features, args.lora_rank)}
        for key, shape in shapes.items():
            parameters[f"transformer.{name}.{key}.{ADAPTER_NAME}.weight"] = (shape, torch.float32)
    return parameters


def trainable_parameters(module):
    """Return the trainable parameters of `module` by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
