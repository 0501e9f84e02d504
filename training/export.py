"""Results that others load: a LoRA file for diffusers and ComfyUI, or a transformer folder; then loaded back."""

import functools
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
    info |= module.family.lora_metadata(stage)
    if stage.name is not None:
        info["expert"] = stage.name
        folder = folder / stage.name
    dtype, export_name = _DTYPES[args.lora_dtype], module.family.lora_export_name
    return save_lora(accelerator, transformer, folder, dtype=dtype, export_name=export_name, info=info)


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
            predict = functools.partial(module_output, module, dataset)
            dtype = _DTYPES[args.lora_dtype]
            num_layers, change = check_lora(pipeline, path, predict, dtype=dtype, subfolder=stage.subfolder)
            checked = (
                f": {num_layers} layers, loaded back by diffusers at the trained strength; it changes the prediction "
                f"by {100 * change:.3g} %"
            )
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
    return module.predict(noisy_latents, batch["sigmas"] * 1000, batch)


# ---------------------------------------------------------------- a LoRA file


def split_scale(scale):
    """Split `scale` into two factors of similar size, of which all but a mantissa in [1, 2) are powers of two.

    Multiplied into A and B they lose nothing in bf16 when `scale` is a power of two, and keep both in range.
    """
    mantissa, exponent = math.frexp(scale)  # mantissa in [0.5, 1)
    exponent -= 1
    return math.ldexp(1.0, exponent // 2), math.ldexp(2 * mantissa, exponent - exponent // 2)


def _exported_tensors(transformer, export_name):
    """Yield the names and the fp32 tensors of a LoRA file, the trained strength, alpha / rank, multiplied in.

    ComfyUI reads no alpha from the header and diffusers none from the tensors, so neither is needed.
    """
    for name, layer in lora_layers(transformer).items():
        factors = split_scale(layer.scaling[ADAPTER_NAME])
        for key, factor in zip(("lora_A", "lora_B"), factors, strict=True):
            weight = getattr(layer, key)[ADAPTER_NAME].weight.detach().float()
            yield f"{export_name(name)}.{key}.weight", weight * factor


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
    tensors, num_values, num_lost = {}, 0, 0
    for name, weight in full_tensors(_exported_tensors(transformer, export_name)):
        if accelerator.is_main_process:
            weight = weight.cpu()
            tensors[name] = weight.to(dtype).contiguous()
            num_values += weight.numel()
            num_lost += int(((weight != 0) & (tensors[name] == 0)).sum())
    layers = lora_layers(transformer)
    rank = next(iter(layers.values())).r[ADAPTER_NAME]
    # The five fields with which every diffusers version loads the file; strength 1, since it is in the tensors.
    fields = {"r": rank, "lora_alpha": rank, "rank_pattern": {}, "alpha_pattern": {}, "target_modules": sorted(layers)}
    header = json.dumps({f"transformer.{key}": value for key, value in fields.items()})

    def write():
        _check_finite(tensors, "The LoRA")
        if num_lost > 1e-3 * num_values:
            share = num_lost / num_values
            logger.warning(
                "--lora_dtype: %.1f %% of the trained values become zero in %s; use fp32.", 100 * share, dtype
            )
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
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        file.write(memoryview(content)[8 + length :])


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
    trained = {name: _factors(layer, ADAPTER_NAME) for name, layer in lora_layers(transformer).items()}
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
    if differing := sorted(set(loaded) ^ set(trained)):
        raise FailedError(
            f"{path.name} was loaded back by diffusers with {len(loaded)} of {len(trained)} layers; differing are "
            f"{', '.join(differing[:5])}."
        )
    for name, factors in trained.items():
        reloaded = _factors(loaded[name], "reloaded")
        # What rounding both factors can change, with room; a wrong strength is off by far more.
        tolerance = 4 * max(torch.finfo(dtype).eps, torch.finfo(loaded[name].lora_A["reloaded"].weight.dtype).eps)
        norm = _inner_product(factors, factors)
        strength = _inner_product(reloaded, factors) / norm if norm > 0 else 1.0
        if abs(strength - 1) > tolerance:
            raise FailedError(
                f"{path.name} was loaded back by diffusers with another strength: layer {name} has {strength:.1%} of "
                "the trained one."
            )
    output = predict()
    if torch.equal(output, base_output):
        raise FailedError(f"{path.name} changes nothing: the output with it is that of the base model.")
    return len(loaded), float((output.float() - base_output.float()).norm() / base_output.float().norm())


def _factors(layer, adapter_name):
    """Return A (r, in) and strength * B (out, r) of an adapter, in fp64 and on the CPU: not a peak of its own."""
    a, b = (getattr(layer, key)[adapter_name].weight.detach().cpu().double() for key in ("lora_A", "lora_B"))
    return a, layer.scaling[adapter_name] * b


def _inner_product(first, second):
    """Return the sum over all entries of (B1 @ A1) * (B2 @ A2), without forming the products (out, in)."""
    (a1, b1), (a2, b2) = first, second
    return float(((b1.T @ b2) * (a1 @ a2.T)).sum())


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
