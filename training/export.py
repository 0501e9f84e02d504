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

from dataset.batches import collate
from runtime.errors import FailedError
from runtime.files import rename_folder, whole_file, write_text
from training.flow_matching import add_noise
from training.model_card import portable_name, write_model_card
from training.module import ADAPTER_NAME, lora_layers


logger = logging.getLogger(__name__)

LORA_FILE = "pytorch_lora_weights.safetensors"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def save_result(args, module, *, prefix, export_name, expert=None, places=None, further_info=None):
    """Write the result of a run and return its path.

    Args:
        args (`argparse.Namespace`)
        module (`DiffusionTrainingModule`)
        prefix, export_name: See `save_lora`.
        expert (`str`, *optional*): Which of several transformers it is; its LoRA gets a folder of this name.
        places (`dict[str | None, str]`, *optional*): Of each expert of this run what the pipeline calls it.
        further_info (`dict[str, str]`, *optional*): Further header entries of a LoRA file.

    Raises:
        FailedError: The result is not finite, or cannot be written.
    """
    folder = pathlib.Path(args.output_dir)
    if args.training_mode == "full":
        return save_transformer(module.transformer, folder / (places or _ONE)[expert])
    base_model = portable_name(args.pretrained_model_name_or_path)
    info = {"base_model": base_model, "lora_rank": str(args.lora_rank), "lora_alpha": str(args.lora_alpha)}
    info |= further_info or {}
    if expert is not None:
        info["expert"] = expert
        folder = folder / expert
        folder.mkdir(exist_ok=True)
    dtype = _DTYPES[args.lora_dtype]
    return save_lora(module.transformer, folder, dtype=dtype, prefix=prefix, export_name=export_name, info=info)


def check_result(args, pipeline, module, dataset, path, *, expert=None, places=None, images=()):
    """Load a LoRA back and check it, and write the model card, with the previews that are there.

    Args:
        args (`argparse.Namespace`)
        pipeline (`DiffusionPipeline`): Stock pipeline with the trained transformer; its other parts may be None.
        module (`DiffusionTrainingModule`): Of the same transformer.
        dataset (`TrainingDataset`): Its first sample is the input of the check.
        path (`pathlib.Path`), expert, places: See `save_result`.
        images (`tuple[str, ...]`): What the pipeline calls the images that it starts from.

    Raises:
        FailedError: The result does not load, or changes nothing.
    """
    places = places or _ONE
    subfolder = places[expert]
    base_model = portable_name(args.pretrained_model_name_or_path)
    is_video = "num_frames" in vars(args)
    names = {"pipeline": type(pipeline).__name__, "base": "\n".join(_base_lines(args))}
    helpers = ["encode_video"] * is_video + ["load_image"] * bool(images)
    names["helpers"] = f"from diffusers.utils import {', '.join(helpers)}\n" if helpers else ""
    names["options"] = "".join(f'{key}="{vars(args)[key]}", ' for key in ("revision", "variant") if vars(args)[key])
    if args.training_mode == "full":
        usage = FULL_USAGE.format(model=type(module.transformer).__name__, subfolder=subfolder, **names)
        print(f"saved {path}")
    else:
        predict = functools.partial(module_output, module, dataset)
        checked = check_lora(pipeline, path, predict, dtype=_DTYPES[args.lora_dtype], subfolder=subfolder)
        usage = LORA_USAGE.format(**names) + "\n".join(_lora_lines(args.output_dir, places))
        change = float(f"{100 * checked['relative_change']:.2g}")
        print(
            f"saved {path}: {checked['layers']} layers, loaded back by diffusers at the trained strength; it changes "
            f"the prediction by {f'{change:.6f}'.rstrip('0').rstrip('.')} %"
        )
    source = "image" if "ImageToVideo" in names["pipeline"] else "text"
    pipeline_tag = f"{source}-to-{'video' if is_video else 'image'}"
    usage = "\n".join([usage, *_sampling_lines(args, images)])
    write_model_card(args, base_model=base_model, pipeline_tag=pipeline_tag, num_items=len(dataset), usage=usage)


# Where a pipeline has its only transformer.
_ONE = {None: "transformer"}

LORA_USAGE = """import torch
from diffusers import {pipeline}
{helpers}
{base}
pipe = {pipeline}.from_pretrained(base_model, {options}dtype=torch.bfloat16)
"""

FULL_USAGE = """import torch
from diffusers import {model}, {pipeline}
{helpers}
{base}
transformer = {model}.from_pretrained("FOLDER_OF_THIS_FILE/{subfolder}", dtype=torch.bfloat16)
pipe = {pipeline}.from_pretrained(base_model, {options}{subfolder}=transformer, dtype=torch.bfloat16)"""

# What stock `load_lora_weights` has to be told for a transformer of this name.
_LOAD_OPTIONS = {"transformer": {}, "transformer_2": {"load_into_transformer_2": True}}


def load_result(pipeline, folder, subfolder):
    """Give the transformer `subfolder` of a stock pipeline the LoRA in a folder."""
    pipeline.load_lora_weights(folder, weight_name=LORA_FILE, **_LOAD_OPTIONS[subfolder])


def _base_lines(args):
    """Yield the Python lines that name the base model."""
    name = json.dumps(portable_name(args.pretrained_model_name_or_path))
    if pathlib.Path(args.pretrained_model_name_or_path).exists():
        yield f'base_model = "FOLDER_OF_THE_BASE_MODEL"  # it was called {name}'
    else:
        yield f"base_model = {name}"
    if args.training_mode == "lora" and args.transformer_path is not None:
        yield f"# trained with another transformer in it: {json.dumps(portable_name(args.transformer_path))}"


def _sampling_lines(args, images):
    """Yield the Python lines that make an image or a video and save it."""
    yield 'pipe.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")'
    yield ""
    prompt = (args.validation_prompt or ["what is to be seen"])[0]
    settings = [f"prompt={json.dumps(prompt, ensure_ascii=False)}"]
    settings += [f'{name}=load_image("{name.upper()}.png")' for name in images]
    sizes = {name: vars(args).get(name) for name in ("height", "width", "num_frames")}
    settings += [f"{name}={size}" for name, size in sizes.items() if size is not None]
    if "num_frames" in vars(args):
        yield f"frames = pipe({', '.join(settings)}).frames[0]"
        yield f'encode_video(frames, fps={round(args.fps)}, output_path="video.mp4")'
    else:
        yield f"image = pipe({', '.join(settings)}).images[0]"
        yield 'image.save("image.png")'


def _lora_lines(output_dir, places):
    """Yield the Python lines that load what this run has written so far."""
    for expert, subfolder in places.items():
        if pathlib.Path(output_dir, expert or "", LORA_FILE).is_file():
            folder = pathlib.PurePosixPath("FOLDER_OF_THIS_FILE", expert or "")
            options = "".join(f", {name}={value}" for name, value in _LOAD_OPTIONS[subfolder].items())
            yield f'pipe.load_lora_weights("{folder}"{options})'


@torch.no_grad()
def module_output(module, dataset):
    """Return what `module` predicts for the first sample of `dataset` at a fixed noise, in eval mode."""
    module.eval()
    batch = send_to_device(collate([dataset[1, 0, 0]], dataset.padded), next(module.parameters()).device)
    noisy_latents = add_noise(batch["latents"], batch["noise"], batch["sigmas"])
    return module.predict(noisy_latents, batch["sigmas"] * 1000, batch)


def split_scale(scale):
    """Split `scale` into two factors of similar size, of which all but a mantissa in [1, 2) are powers of two.

    Multiplied into A and B they lose nothing in bf16 when `scale` is a power of two, and keep both in range.
    """
    mantissa, exponent = math.frexp(scale)  # mantissa in [0.5, 1)
    exponent -= 1
    return math.ldexp(1.0, exponent // 2), math.ldexp(2 * mantissa, exponent - exponent // 2)


def lora_state_dict(transformer, *, dtype, export_name):
    """Return the adapters as tensors with the trained strength, alpha / rank, multiplied in.

    ComfyUI reads no alpha from the header and diffusers none from the tensors, so neither is needed.

    Args:
        transformer (`nn.Module`): With adapters of `add_lora`.
        dtype (`torch.dtype`): Of the result.
        export_name (`Callable[[str], str]`): From the name of a layer in diffusers to its name in the file.

    Returns:
        `dict[str, torch.Tensor]` with `<name>.lora_A.weight` (r, in) and `<name>.lora_B.weight` (out, r), on the CPU.
    """
    state_dict = {}
    for name, layer in lora_layers(transformer).items():
        factors = split_scale(layer.scaling[ADAPTER_NAME])
        for key, factor in zip(("lora_A", "lora_B"), factors, strict=True):
            weight = getattr(layer, key)[ADAPTER_NAME].weight.detach().float() * factor
            state_dict[f"{export_name(name)}.{key}.weight"] = weight.to("cpu", dtype).contiguous()
    return state_dict


def adapter_metadata(transformer, *, prefix):
    """Return the five fields with which every diffusers version loads the file, keys prefixed as in the file."""
    layers = lora_layers(transformer)
    ranks = {layer.r[ADAPTER_NAME] for layer in layers.values()}
    assert len(ranks) == 1, "adapters of one run have one rank"
    rank = ranks.pop()
    fields = {
        "r": rank,
        "lora_alpha": rank,  # strength 1: the trained one is in the tensors
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted(layers),
    }
    return {f"{prefix}.{key}": value for key, value in fields.items()}


def save_safetensors(tensors, path, metadata):
    """Write a safetensors file whose bytes depend on nothing but its content, complete or not at all.

    safetensors itself writes several header entries in random order; here they are sorted.
    """
    content = safetensors.torch.save(tensors, metadata)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    header = {"__metadata__": header.pop("__metadata__")} | header
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)  # the tensors start at a multiple of 8
    with whole_file(path) as partial_path, partial_path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        file.write(memoryview(content)[8 + length :])


def save_lora(transformer, output_dir, *, dtype, export_name, prefix, info):
    """Write the LoRA of `transformer` to `output_dir`/pytorch_lora_weights.safetensors and return the path.

    Args:
        info (`dict[str, str]`): Further header entries; no time and no path, or reruns would differ.

    Raises:
        FailedError: A tensor is not finite.
    """
    state_dict = lora_state_dict(transformer, dtype=dtype, export_name=export_name)
    for name, tensor in state_dict.items():
        if not tensor.isfinite().all():
            raise FailedError(f"The LoRA was not saved: {name} is not finite.")
    if (share := _flushed_share(transformer, dtype)) > 1e-3:
        logger.warning("--lora_dtype: %.1f %% of the trained values become zero in %s; use fp32.", 100 * share, dtype)
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(adapter_metadata(transformer, prefix=prefix))}
    path = pathlib.Path(output_dir) / LORA_FILE
    save_safetensors(state_dict, path, metadata | info)
    return path


def _flushed_share(transformer, dtype):
    """Return the share of the trained values that are zero in `dtype` and were not before."""
    lost = total = 0
    for layer in lora_layers(transformer).values():
        for adapters in (layer.lora_A, layer.lora_B):
            weight = adapters[ADAPTER_NAME].weight.detach()
            lost += int(((weight != 0) & (weight.to(dtype) == 0)).sum())
            total += weight.numel()
    return lost / max(total, 1)


@torch.no_grad()
def check_lora(pipeline, path, predict, *, dtype, subfolder="transformer"):
    """Load a LoRA file back through stock diffusers and compare it with what was trained.

    The trained adapters are taken off the transformer and replaced by those of the file.

    Args:
        pipeline (`DiffusionPipeline`): Stock pipeline with the trained transformer, in eval mode.
        path (`pathlib.Path`): The file.
        predict (`Callable[[], torch.Tensor]`): Runs the transformer on fixed inputs.
        dtype (`torch.dtype`): Of the file.
        subfolder (`str`): What the pipeline calls the transformer.

    Returns:
        `dict` with `layers` and `relative_change`, how much that of the file changes the output.

    Raises:
        FailedError: A layer is missing, has another strength, or the LoRA changes nothing.
    """
    transformer = getattr(pipeline, subfolder)
    trained = {}
    for name, layer in lora_layers(transformer).items():
        trained[name] = _factors(layer, ADAPTER_NAME)
    transformer.unload_lora()
    base_output = predict()

    options = {"weight_name": path.name, "adapter_name": "reloaded"} | _LOAD_OPTIONS[subfolder]
    pipeline.load_lora_weights(path.parent, **options)
    # Into an image-to-video model diffusers adds adapters of zeros for the image's keys where a file has none.
    loaded = {
        name: layer
        for name, layer in lora_layers(transformer).items()
        if name in trained or layer.lora_B["reloaded"].weight.any()
    }
    if set(loaded) != set(trained):
        differing = sorted(set(loaded) ^ set(trained))
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
    change = float((output.float() - base_output.float()).norm() / base_output.float().norm())
    if torch.equal(output, base_output):
        raise FailedError(f"{path.name} changes nothing: the output with it is that of the base model.")
    return {"layers": len(loaded), "relative_change": change}


def _factors(layer, adapter_name):
    """Return A (r, in) and strength * B (out, r) of an adapter, in fp64 and on the CPU: not a peak of its own."""
    a, b = (getattr(layer, key)[adapter_name].weight.detach().cpu().double() for key in ("lora_A", "lora_B"))
    return a, layer.scaling[adapter_name] * b


def _inner_product(first, second):
    """Return the sum over all entries of (B1 @ A1) * (B2 @ A2), without forming the products (out, in)."""
    (a1, b1), (a2, b2) = first, second
    return float(((b1.T @ b2) * (a1 @ a2.T)).sum())


def save_transformer(transformer, path):
    """Write all weights as a folder that stock `from_pretrained` opens, complete or not at all, and return its path.

    Raises:
        FailedError: A parameter is not finite.
    """
    for name, parameter in transformer.named_parameters():
        if not parameter.isfinite().all():
            raise FailedError(f"The transformer was not saved: {name} is not finite.")
    final = pathlib.Path(path)
    partial = final.with_name(final.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        transformer.save_pretrained(partial)
    except (OSError, safetensors.SafetensorError) as error:  # such as where the disk is full
        shutil.rmtree(partial, ignore_errors=True)
        raise FailedError(f"{final} cannot be written: {error}. What was complete before still is.") from error
    # diffusers writes where the base came from; a path of this machine does not belong into a result.
    config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)
    write_text(partial / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    rename_folder(partial, final)
    return final
