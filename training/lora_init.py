"""Start the adapters of a new run from the weights in a LoRA file, in any layout that stock diffusers converts."""

import json
import pathlib

import torch
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open

from runtime.errors import RefusedError
from runtime.files import refuse_pointer
from training.export import LORA_FILE
from training.module import ADAPTER_NAME, lora_layers


def read_initial_lora(args, lora_state_dict, skeleton, targets, *, expert=None):
    """Read the LoRA that `--lora_init_path` names, and check that this run can go on with all of it.

    Args:
        args (`argparse.Namespace`)
        lora_state_dict (`Callable[[dict], dict]`): That of the stock pipeline, which renames what others have written.
        skeleton (`nn.Module`): The transformer; only names and shapes are read.
        targets (`list[str]`): The layers that this run adapts.
        expert (`str`, *optional*): Which of several transformers is trained.

    Returns:
        `dict[str, tuple[torch.Tensor, torch.Tensor]]`: Layer -> A (r, in) and B (out, r), the file's strength
        multiplied into B. Empty without the flag.

    Raises:
        RefusedError: It is no LoRA file, is that of another expert, or does not fit the model or the flags.
    """
    if args.lora_init_path is None:
        return {}
    path = _find_file(args, expert)
    where = f"--lora_init_path {path}"
    try:
        refuse_pointer(path)
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, ValueError, SafetensorError) as error:
        raise RefusedError(f"{where} cannot be read: {error}.") from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and not name.endswith(".alpha"):
            raise RefusedError(f"{where}: {name} is {tensor.dtype}; a LoRA that is quantised is not read.")
        if not tensor.float().isfinite().all():
            raise RefusedError(f"{where}: {name} is not finite.")
        if tensor.ndim != 2 and ".lora_" in name and name.endswith(".weight"):
            raise RefusedError(f"{where}: {name} has {tensor.ndim} dimensions; adapters of linear layers have 2.")
    of_file = header.get("expert")
    if expert is not None and of_file not in (None, expert):
        raise RefusedError(f"{where} is a LoRA of the expert {of_file}, and this run trains {expert}.")
    # What is neither of a pair nor its alpha diffusers drops, if it names it at all.
    pairs = {name.partition(".lora_")[0] for name in tensors if ".lora_" in name}
    unplaced = [name for name in tensors if ".lora_" not in name and name.removesuffix(".alpha") not in pairs]
    try:
        converted = {} if unplaced else lora_state_dict(dict(tensors))
    except Exception as error:  # its converters raise whatever an unknown name leads them to
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise RefusedError(f"{where} is in no layout that diffusers reads ({what}).") from None

    try:
        metadata = json.loads(header.get("lora_adapter_metadata", "{}"))
        fields = {key.removeprefix("transformer."): value for key, value in metadata.items()}
    except (ValueError, AttributeError):
        raise RefusedError(f"{where}: lora_adapter_metadata in its header is not a JSON object.") from None
    initial = {}
    for name in converted:
        layer = name.removeprefix("transformer.").removesuffix(".lora_A.weight")
        partner = name.replace(".lora_A.", ".lora_B.")
        if name == f"transformer.{layer}.lora_A.weight" and partner in converted and layer in targets:
            a, b = converted[name].float(), converted[partner].float()
            initial[layer] = a, b * _strength(fields, layer, rank=len(a))
    placed = {f"transformer.{layer}.lora_{half}.weight" for layer in initial for half in "AB"}
    unplaced += [name for name in converted if name not in placed]
    if unplaced or not initial:
        raise RefusedError(
            f"{where}: {len(unplaced)} of {len(tensors)} tensors have no place in the adapters of this run, such as "
            f"{', '.join(unplaced[:5]) or 'none'}; it adapts {', '.join(args.lora_target_modules)}."
        )
    for layer, (a, b) in initial.items():
        linear = skeleton.get_submodule(layer)
        if (a.shape[1], b.shape[0]) != (linear.in_features, linear.out_features):
            raise RefusedError(
                f"{where} is for another model: {layer} has widths {a.shape[1]} and {b.shape[0]} in it, here "
                f"{linear.in_features} and {linear.out_features}."
            )
        if len(a) != args.lora_rank:
            raise RefusedError(f"{where} has rank {len(a)}, and --lora_rank is {args.lora_rank}; make them equal.")
    return initial


def check_base_of_lora(args, weights, *, expert=None):
    """Check that the LoRA of `--lora_init_path` was trained on the weights of this run, if it says on which.

    Args:
        args (`argparse.Namespace`)
        weights (`str`, *optional*): The digest of those of the transformer, None where they are not looked at.
        expert (`str`, *optional*): See `read_initial_lora`.

    Raises:
        RefusedError: It was trained on others.
    """
    if args.lora_init_path is None or weights is None:
        return
    path = _find_file(args, expert)
    with safe_open(path, "pt") as file:
        header = file.metadata() or {}
    if header.get("base_weights", weights) != weights:
        base = args.transformer_path or args.pretrained_model_name_or_path
        raise RefusedError(
            f"--lora_init_path {path} was trained on other weights (of {header.get('base_model')}) than the "
            f"transformer of {base} has; give those, which may lie anywhere, or, to start from it on these all the "
            "same, a copy of the file without base_weights in its header."
        )


def _find_file(args, expert):
    path = pathlib.Path(args.lora_init_path)
    if path.is_dir():
        found = [path / folder / LORA_FILE for folder in filter(None, (expert, "."))]
        path = next((file for file in found if file.is_file()), found[0])
    return path


def _strength(fields, layer, *, rank):
    """Return the factor that the header of a file asks for, as PEFT would apply it."""
    patterns = fields.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(list(patterns), layer), fields.get("lora_alpha", rank))
    return alpha / (rank**0.5 if fields.get("use_rslora") else rank)


@torch.no_grad()
def start_from(transformer, initial):
    """Give the adapters of `transformer` the weights of `read_initial_lora`, at the strength that they have there.

    Returns:
        `str`: One line for a person, on what is started with and what is not restored.
    """
    layers = lora_layers(transformer)
    for name, (a, b) in initial.items():
        layer = layers[name]
        layer.lora_A[ADAPTER_NAME].weight.copy_(a)
        layer.lora_B[ADAPTER_NAME].weight.copy_(b / layer.scaling[ADAPTER_NAME])
    return (
        f"{len(initial)} of {len(layers)} adapters start from the weights of --lora_init_path; not restored are the "
        "optimizer's state, the schedule, the step and the order of the data"
    )
