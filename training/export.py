"""Results that others load: a LoRA file for diffusers and ComfyUI, or a transformer folder; then loaded back."""

import json
import logging
import math
import pathlib
import shutil

import safetensors.torch
import torch
from accelerate.utils import send_to_device
from huggingface_hub import save_torch_state_dict

from dataset.batches import collate
from runtime.errors import FailedError
from runtime.files import rename_folder, whole_file, write_text
from runtime.processes import full_tensors, on_main_process
from training.flow_matching import add_noise
from training.model_card import LOAD_OPTIONS, portable_name, write_model_card
from training.module import ADAPTER_NAME, lora_layers


logger = logging.getLogger(__name__)

LORA_FILE = "pytorch_lora_weights.safetensors"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def save_result(accelerator, args, module, stage, base_weights):
    """Write the result of a stage and return its path. Every process must call it.

    Args:
        accelerator (`Accelerator`), args (`argparse.Namespace`)
        module (`DiffusionTrainingModule`): What was trained.
        stage (`Stage`)
        base_weights (`str`): Digest of the weights that a LoRA was trained on.

    Raises:
        FailedError: The result is not finite, or cannot be written.
    """
    folder, transformer = pathlib.Path(args.output_dir), module.transformer
    if args.training_mode == "full":
        return save_transformer(accelerator, transformer, folder / stage.subfolder)
    info = {"base_model": portable_name(args.pretrained_model_name_or_path), "base_weights": base_weights}
    info |= {"lora_rank": str(args.lora_rank), "lora_alpha": str(args.lora_alpha)}
    info |= module.family.lora_metadata(stage) | ({} if stage.name is None else {"expert": stage.name})
    how = {"dtype": _DTYPES[args.lora_dtype], "export_name": module.family.lora_export_name, "info": info}
    return save_lora(accelerator, transformer, folder / (stage.name or ""), **how)


def check_result(accelerator, args, module, stage, dataset, path):
    """Load a LoRA back and check it, and write the model card with the previews. Every process must call it.

    Args:
        accelerator (`Accelerator`), args (`argparse.Namespace`), module (`DiffusionTrainingModule`), stage (`Stage`)
        dataset (`TrainingDataset`): Its first sample is the input of the check.
        path (`pathlib.Path`): From `save_result`.

    Raises:
        FailedError: The result does not load, or changes nothing.
    """

    def check():
        checked = ""
        if args.training_mode == "lora":
            pipeline = module.family.stock_pipeline(module.transformer)
            how = {"dtype": _DTYPES[args.lora_dtype], "subfolder": stage.subfolder}
            num_layers, change = check_lora(pipeline, path, lambda: module_output(module, dataset), **how)
            checked = f": {num_layers} layers, loaded back by diffusers at the trained strength; it changes the "
            checked += f"prediction by {100 * change:.3g} %"
        print(f"saved {path}{checked}")
        write_model_card(args, module.family, stage, num_items=len(dataset))

    on_main_process(accelerator, check)


def load_result(pipeline, output_dir, stage):
    """Give a stock pipeline the LoRA that a stage has left in the output folder of its run."""
    folder = pathlib.Path(output_dir, stage.name or "")
    pipeline.load_lora_weights(folder, weight_name=LORA_FILE, **LOAD_OPTIONS[stage.subfolder])


@torch.no_grad()
def module_output(module, dataset):
    """Return what `module` predicts for the first sample of `dataset` at a fixed noise, in eval mode."""
    module.eval()
    batch = send_to_device(collate([dataset[1, 0, 0]], dataset.padded), next(module.parameters()).device)
    noisy_latents = add_noise(batch["latents"], batch["noise"], batch["sigmas"])
    return module.family.predict(module.transformer, noisy_latents, batch["sigmas"] * 1000, batch)


# ---------------------------------------------------------------- a LoRA file


def split_scale(scale):
    """Split `scale` into two factors of similar size, of which all but a mantissa in [1, 2) are powers of two.

    Multiplied into A and B they lose nothing in bf16 when `scale` is a power of two, and keep both in range.
    """
    mantissa, exponent = math.frexp(scale)  # mantissa in [0.5, 1)
    exponent -= 1
    return math.ldexp(1.0, exponent // 2), math.ldexp(2 * mantissa, exponent - exponent // 2)


def _factors(layer):
    """Return A (r, in) and B (out, r) of a trained adapter in fp32, its strength, alpha / rank, multiplied in.

    ComfyUI reads no alpha from the header and diffusers none from the tensors, so neither is needed.
    """
    factors = split_scale(layer.scaling[ADAPTER_NAME])
    halves = (layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight)
    return [half.detach().float() * factor for half, factor in zip(halves, factors, strict=True)]


def save_lora(accelerator, transformer, output_dir, *, dtype, export_name, info):
    """Write the LoRA of `transformer` to `output_dir`/pytorch_lora_weights.safetensors and return the path.

    It has `<name>.lora_A.weight` (r, in) and `<name>.lora_B.weight` (out, r). Every process must call it.

    Args:
        accelerator (`Accelerator`)
        transformer (`nn.Module`): With adapters of `add_lora`.
        output_dir (`pathlib.Path`)
        dtype (`torch.dtype`): Of the tensors.
        export_name (`Callable[[str], str]`): From the name of a layer in diffusers to its name in the file.
        info (`dict[str, str]`): Further header entries; no time and no path, or reruns would differ.

    Raises:
        FailedError: A tensor is not finite.
    """
    layers = lora_layers(transformer)
    halves = (
        (f"{export_name(name)}.lora_{half}.weight", weight)
        for name, layer in layers.items()
        for half, weight in zip("AB", _factors(layer), strict=True)
    )
    tensors, num_values, num_kept = {}, 0, 0
    for name, weight in full_tensors(halves):
        if accelerator.is_main_process:
            tensors[name] = weight.cpu().to(dtype).contiguous()
            num_values += int(weight.count_nonzero())
            num_kept += int(tensors[name].count_nonzero())
    if num_kept < 0.999 * num_values:
        lost = 100 * (1 - num_kept / num_values)
        logger.warning("--lora_dtype: %.1f %% of the trained values become zero in %s; use fp32", lost, dtype)
    rank = next(iter(layers.values())).r[ADAPTER_NAME]
    # The five fields with which every diffusers version loads the file; strength 1, since it is in the tensors.
    fields = {"r": rank, "lora_alpha": rank, "rank_pattern": {}, "alpha_pattern": {}, "target_modules": sorted(layers)}
    header = json.dumps({f"transformer.{key}": value for key, value in fields.items()})

    def write():
        _check_finite(tensors, "The LoRA")
        output_dir.mkdir(exist_ok=True)
        save_safetensors(tensors, output_dir / LORA_FILE, {"format": "pt", "lora_adapter_metadata": header} | info)
        return output_dir / LORA_FILE

    return on_main_process(accelerator, write)


def _check_finite(tensors, what):
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise FailedError(f"{what} was not saved: {name} is not finite.")


def save_safetensors(tensors, path, metadata):
    """Write a safetensors file whose bytes depend on nothing but its content, complete or not at all.

    safetensors itself writes several header entries in random order; here they are sorted.
    """
    content = safetensors.torch.save(tensors, metadata)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header = {"__metadata__": dict(sorted(header.pop("__metadata__").items()))} | header
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)  # the tensors start at a multiple of 8
    with whole_file(path) as unfinished, unfinished.open("wb") as file:
        file.writelines([len(encoded).to_bytes(8, "little"), encoded, memoryview(content)[8 + length :]])


@torch.no_grad()
def check_lora(pipeline, path, predict, *, dtype, subfolder="transformer"):
    """Load a LoRA file back through stock diffusers and compare it with what was trained.

    The trained adapters are removed from the transformer and replaced by those of the file.

    Args:
        pipeline (`DiffusionPipeline`): Stock pipeline with the trained transformer, in eval mode.
        path (`pathlib.Path`): The file.
        predict (`Callable[[], torch.Tensor]`): Runs the transformer on fixed inputs.
        dtype (`torch.dtype`): Of the file.
        subfolder (`str`): What the pipeline calls the transformer.

    Returns:
        `tuple[int, float]`: The number of layers, and by how much of its size the LoRA changes the output.

    Raises:
        FailedError: A layer is missing, has another strength, or the LoRA changes nothing.
    """
    transformer = getattr(pipeline, subfolder)
    # On the CPU: not a peak of its own.
    trained = {
        name: [half.to(dtype).cpu() for half in _factors(layer)] for name, layer in lora_layers(transformer).items()
    }
    transformer.unload_lora()
    base_output = predict()

    options = {"weight_name": path.name, "adapter_name": "reloaded"} | LOAD_OPTIONS[subfolder]
    pipeline.load_lora_weights(path.parent, **options)
    # Into an image-to-video model diffusers adds adapters of zeros for the image's keys where a file has none.
    loaded = {
        name: layer
        for name, layer in lora_layers(transformer).items()
        if name in trained or layer.lora_B["reloaded"].weight.any()
    }
    where = f"{path.name} was loaded back by diffusers with"
    if differing := sorted(set(loaded) ^ set(trained)):
        some = ", ".join(differing[:5])
        raise FailedError(f"{where} {len(loaded)} of {len(trained)} layers; differing are {some}.")
    for name, layer in loaded.items():
        halves = [half["reloaded"].weight.cpu() for half in (layer.lora_A, layer.lora_B)]
        pairs = zip(halves, trained[name], strict=True)
        if layer.scaling["reloaded"] != 1 or not all(torch.equal(half, value.to(half.dtype)) for half, value in pairs):
            raise FailedError(f"{where} another strength, or other weights, than were trained: layer {name}.")
    output = predict()
    if torch.equal(output, base_output):
        raise FailedError(f"{path.name} changes nothing: the output with it is that of the base model.")
    return len(loaded), float((output.float() - base_output.float()).norm() / base_output.float().norm())


# ---------------------------------------------------------------- a transformer folder


def save_transformer(accelerator, transformer, path):
    """Write all weights as a folder that stock `from_pretrained` opens, complete or not at all, and return its path.

    Every process must call it.

    Args:
        accelerator (`Accelerator`), transformer (`nn.Module`), path (`pathlib.Path`)

    Raises:
        FailedError: A weight is not finite, or the folder cannot be written.
    """
    tensors = full_tensors(transformer.state_dict().items())
    tensors = {name: tensor for name, tensor in tensors if accelerator.is_main_process}

    def write():
        _check_finite(tensors, "The transformer")
        unfinished = path.with_name(path.name + ".tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        # diffusers would also write where the base came from; a path of this machine does not belong in a result.
        config = json.loads(transformer.to_json_string())
        config.pop("_name_or_path", None)
        try:
            unfinished.mkdir()
            write_text(unfinished / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
            pattern = "diffusion_pytorch_model{suffix}.safetensors"
            save_torch_state_dict(tensors, unfinished, filename_pattern=pattern, max_shard_size="10GB")
        except (OSError, safetensors.SafetensorError) as error:  # such as where the disk is full
            shutil.rmtree(unfinished, ignore_errors=True)
            raise FailedError(f"{path} cannot be written: {error}. What was complete before still is.") from error
        rename_folder(unfinished, path)
        return path

    return on_main_process(accelerator, write)
