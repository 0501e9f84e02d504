"""Start the adapters of a new run from the weights in a LoRA file, in any layout that stock diffusers converts."""

import json
import pathlib

import torch
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from runtime.errors import RefusedError
from runtime.files import refuse_pointer
from training.export import LORA_FILE
from training.module import ADAPTER_NAME, lora_layers


def read_initial_lora(args, family, stage, targets):
    """Read the LoRA that `--lora_init_path` names, and check that this run can start from all of it.

    Args:
        args (`argparse.Namespace`)
        family (`Family`): Its stock pipeline renames what others have written; its skeleton has names and widths.
        stage (`Stage`)
        targets (`list[str]`): The layers that this run adapts.

    Returns:
        `dict[str, tuple[torch.Tensor, torch.Tensor]]`: Layer -> A (r, in) and B (out, r), the file's strength
        multiplied into B. Empty without the flag.

    Raises:
        RefusedError: It is no LoRA file, is that of another expert, or does not fit the model or the flags.
    """
    if args.lora_init_path is None:
        return {}
    path = _find_file(args, stage)
    where = f"--lora_init_path {path}"
    try:
        refuse_pointer(path)
        header, tensors = _read_header(path), load_file(path)
        metadata = json.loads(header.get("lora_adapter_metadata", "{}"))
        fields = {key.removeprefix("transformer."): value for key, value in metadata.items()}
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise RefusedError(f"{where} cannot be read: {error}.") from None
    if stage.name is not None and header.get("expert", stage.name) != stage.name:
        raise RefusedError(f"{where} is a LoRA of the expert {header['expert']}, and this run trains {stage.name}.")
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() or name.endswith(".alpha")) or not tensor.float().isfinite().all():
            raise RefusedError(f"{where}: {name} ({tensor.dtype}) does not consist of finite floating-point numbers.")
    # diffusers drops, often without a word, what is neither part of a pair nor its alpha.
    pairs = {name.partition(".lora_")[0] for name in tensors if ".lora_" in name}
    unplaced = [name for name in tensors if ".lora_" not in name and name.removesuffix(".alpha") not in pairs]
    try:
        converted = {} if unplaced else family.pipeline_class.lora_state_dict(dict(tensors))
    except Exception as error:  # its converters raise whatever an unknown name leads them to
        raise RefusedError(f"{where} is in no layout that diffusers reads ({error!r:.200}).") from None
    initial = {}
    for layer in targets:
        keys = [f"transformer.{layer}.lora_{half}.weight" for half in "AB"]
        if all(key in converted for key in keys):
            a, b = (converted.pop(key).float() for key in keys)
            linear = family.skeleton.get_submodule(layer)
            found = tuple(a.shape), tuple(b.shape)
            wanted = (args.lora_rank, linear.in_features), (linear.out_features, args.lora_rank)
            if found != wanted:
                needed = f"with this model and --lora_rank {args.lora_rank} they are {wanted[0]} and {wanted[1]}"
                raise RefusedError(f"{where}: A and B of {layer} have the shapes {found[0]} and {found[1]}; {needed}.")
            initial[layer] = a, b * _strength(fields, layer, rank=len(a))
    unplaced += converted
    if unplaced or not initial:
        what = f"{len(unplaced)} of {len(tensors)} tensors have no place in the adapters of this run"
        some, adapted = ", ".join(unplaced[:5]) or "none", ", ".join(args.lora_target_modules)
        raise RefusedError(f"{where}: {what}, such as {some}; it adapts {adapted}.")
    return initial


def check_base_of_lora(args, stage, weights):
    """Check that the LoRA of `--lora_init_path` was trained on the weights of this run, if it names them.

    Args:
        args (`argparse.Namespace`), stage (`Stage`)
        weights (`str`, *optional*): The digest of those of the transformer; None: not known, nothing is checked.

    Raises:
        RefusedError: It was trained on others.
    """
    if args.lora_init_path is None or weights is None:
        return
    path = _find_file(args, stage)
    header = _read_header(path)
    if header.get("base_weights", weights) != weights:
        base = args.transformer_path or args.pretrained_model_name_or_path
        others = f"other weights (of {header.get('base_model')}) than {base} has"
        how = "give those, or remove base_weights from its header to use it on these"
        raise RefusedError(f"--lora_init_path {path} was trained on {others}; {how}.")


def _find_file(args, stage):
    path = pathlib.Path(args.lora_init_path)
    if path.is_dir():
        files = [path / (stage.name or "") / LORA_FILE, path / LORA_FILE]
        path = next((file for file in files if file.is_file()), files[0])
    return path


def _read_header(path):
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def _strength(fields, layer, *, rank):
    """Return the factor that the header of a file asks for, as PEFT would apply it."""
    patterns = fields.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(list(patterns), layer), fields.get("lora_alpha", rank))
    return alpha / (rank**0.5 if fields.get("use_rslora") else rank)


@torch.no_grad()
def start_from(transformer, initial):
    """Give the adapters of `transformer` the weights of `read_initial_lora`, at the strength that they have there.

    Returns:
        `str`: One line for a person: what the run starts from, and what is not restored.
    """
    layers = lora_layers(transformer)
    for name, (a, b) in initial.items():
        layer = layers[name]
        layer.lora_A[ADAPTER_NAME].weight.copy_(a)
        layer.lora_B[ADAPTER_NAME].weight.copy_(b / layer.scaling[ADAPTER_NAME])
    started = f"{len(initial)} of {len(layers)} adapters start from the weights of --lora_init_path"
    return f"{started}; not restored are the optimizer's state, the schedule, the step and the order of the data"
