"""What every model family reads the same way: transformers in a pipeline folder or next to it, schedulers.

The first argument of each function is the class of the transformer or scheduler, or what of the family is allowed;
`hub` is `revision` and `variant`, as `from_pretrained` takes them.
"""

import contextlib
import os
import pathlib

import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

from pipelines.weights import (
    check_small_file,
    check_tensors,
    check_text_model,
    digest_tensors,
    find_folder,
    find_weights,
    read_files,
    read_tensors,
)


# What the rest of a pipeline prepares for its transformer: one that replaces it must be fed the same.
_INTERFACE = ("patch_size", "in_channels", "out_channels", "text_dim", "joint_attention_dim", "image_dim")
_INTERFACE += ("pos_embed_seq_len",)

# Parts that some models of a family do without.
_OPTIONAL = ("image_encoder", "transformer_2")


# ---------------------------------------------------------------- pipelines


@contextlib.contextmanager
def built_from(files):
    """Context or decorator: what a library stumbles over in files that are whole is a `ValueError` that names them."""
    try:
        yield
    except (OSError, ValueError):
        raise
    except Exception as error:  # libraries raise many kinds
        raise ValueError(f"its {files} cannot be understood ({type(error).__name__}: {error})") from error


def check_pipeline(pipelines, parts, pretrained_model_name_or_path, *, revision=None, **_):
    """Check that a pipeline and its parts are of the classes that are trained, and that its configs are here.

    Args:
        pipelines (`tuple[type]`): That are allowed.
        parts (`dict[str, tuple[type]]`): Those of each part that has weights.

    Returns:
        `dict`: Its model_index.json.

    Raises:
        OSError: There is none.
        ValueError: It is another pipeline, has other parts, or a file of it is cut short or a pointer of Git LFS.
    """
    root = pathlib.Path(pretrained_model_name_or_path)
    if root.is_dir():
        if not (root / "model_index.json").is_file():
            raise OSError(f"{root} has no model_index.json: it is no folder of a diffusers pipeline")
        check_small_file(root / "model_index.json")
    index = DiffusionPipeline.load_config(pretrained_model_name_or_path, revision=revision)
    _refuse_other_classes("it", index.get("_class_name"), pipelines)
    for part, classes in parts.items():
        if (name := _class_of(index, part)) is not None or part not in _OPTIONAL:
            _refuse_other_classes(f"its {part}", name, classes)
    for part in index if root.is_dir() else ():
        for path in sorted(root.glob(f"{part}/*")):
            if path.suffix in (".json", ".txt", ".model"):
                check_small_file(path)
    return index


def _refuse_other_classes(what, name, classes):
    allowed = [model_class.__name__ for model_class in classes]
    if name not in allowed:
        raise ValueError(f"{what} is a {name}; allowed {'are' if len(allowed) > 1 else 'is'} {' and '.join(allowed)}")


def _class_of(index, part):
    """Return what model_index.json calls the class of a part, None where it has none."""
    entry = index.get(part)
    return entry[1] if isinstance(entry, (list, tuple)) and len(entry) == 2 else None


def check_weights(
    parts, pretrained_model_name_or_path, reads, *, transformer_path=None, required=False, revision=None, variant=None
):
    """Check from headers that weights are whole, and those of the model: each tensor has a place and is cast rightly.

    Args:
        parts (`dict[str, tuple[type]]`): As `check_pipeline` takes them; the first of each is what is looked for.
        reads (`list[str]`): Those that a run reads, the transformer that it trains first.
        transformer_path (`str`, *optional*): See `load_transformer`; in the place of the first.
        required (`bool`): Without it parts whose weights are not on this machine are passed over.

    Returns:
        `dict[str, str]`: From each part that is here to the digest of its weights.

    Raises:
        OSError: There is no such file.
        ValueError: It is cut short, a pointer of Git LFS, or of a model other than that of the config.
    """
    is_here = os.path.isdir(pretrained_model_name_or_path)
    root = find_folder(pretrained_model_name_or_path, revision)
    digests = {}
    for part in _present(root, reads):
        with built_from(part):
            path = transformer_path if part == reads[0] else None
            where, model_class = path or os.path.join(root, part), parts[part][0]
            config = _load_config(model_class, pretrained_model_name_or_path, part, revision=revision)
            if path is not None and not _is_single_file(path):
                config = _load_config(model_class, path)
            elif part == "transformer_2":
                of_other = _load_config(model_class, pretrained_model_name_or_path, "transformer", revision=revision)
                _refuse_unequal(config, of_other)
            # A pipeline reads a part without the variant where it has none with it; a transformer is read alone.
            variants = (None,) if path else (variant,) if part.startswith("transformer") else (variant, None)
            found = (find_weights(where, model_class, of_variant) for of_variant in variants)
            files = [path] if _is_single_file(path) else next(filter(None, found), [])
            # What a folder holds in part is incomplete, and on the hub only not fetched yet.
            is_enough = any if is_here or path else all
            if not required and not (files and is_enough(map(os.path.isfile, files))):
                continue
            if not files:
                raise OSError(f"there is no file of weights in {where}")
            tensors = read_files(files)
            if issubclass(model_class, ModelMixin):
                skeleton = _without_memory(model_class, config, torch.float32)
                if _is_single_file(path):
                    tensors = _renamed(skeleton, tensors)
                tensors = check_tensors(where, tensors, skeleton)
            else:
                check_text_model(where, tensors, model_class, config)
            digests[part] = digest_tensors(tensors.values())
    return digests


def fetch_weights(parts, pretrained_model_name_or_path, reads, checked, *, transformer_path=None, **hub):
    """Bring what is on the hub only to this machine and check it, so that no part turns out to be wrong later.

    Args:
        checked (`dict[str, str]`): What `check_weights` returned; the other arguments are as it takes them.

    Returns:
        `dict[str, str]`: The same of all parts.

    Raises:
        OSError, ValueError: See `check_weights`.
    """
    folder, is_here = pretrained_model_name_or_path, os.path.isdir(pretrained_model_name_or_path)
    if checked.keys() == set(_present(find_folder(folder, hub["revision"]), reads)):
        return checked
    if not is_here:
        unread = set(parts).difference(reads[1:] if transformer_path else reads)
        folder = DiffusionPipeline.download(folder, **dict.fromkeys(unread), **hub)
    return check_weights(
        parts, folder, reads, transformer_path=transformer_path, required=True, variant=hub["variant"]
    )


def _present(folder, reads):
    """Return those of the parts `reads` that a pipeline has, which may do without an image encoder."""
    index = DiffusionPipeline.load_config(folder)
    return [part for part in reads if part != "image_encoder" or _class_of(index, part) is not None]


def _load_config(model_class, pretrained_model_name_or_path, subfolder="", *, revision=None):
    """Return the config of a part, as its class takes it.

    Raises:
        ValueError: It is that of another class, or of quantised weights.
    """
    source = {"subfolder": subfolder, "revision": revision}
    if os.path.isdir(pretrained_model_name_or_path):
        file = os.path.join(pretrained_model_name_or_path, subfolder, "config.json")
        if not os.path.isfile(file):
            raise OSError(f"there is no {file}")
        check_small_file(file)
    if issubclass(model_class, ModelMixin):
        config = values = model_class.load_config(pretrained_model_name_or_path, **source)
        name, allowed = values.get("_class_name", model_class.__name__), (model_class.__name__,)
    else:
        config_class = model_class.config_class
        values, _ = config_class.get_config_dict(pretrained_model_name_or_path, **source)
        # A model for images alone is read out of one for images and text, too.
        allowed = config_class.model_type, config_class.model_type.removesuffix("_vision_model")
        name = values.get("model_type", allowed[0])
        config = config_class.from_pretrained(pretrained_model_name_or_path, **source) if name in allowed else None
    what = subfolder or "transformer"
    if name not in allowed:
        raise ValueError(f"its {what} is a {name}; allowed is {allowed[0]}")
    if values.get("quantization_config"):
        raise ValueError(
            f"its {what} is quantised ({values['quantization_config'].get('quant_method')}); give it as it was before"
        )
    return config


def _refuse_unequal(config, of_other):
    for key in sorted(config.keys() & of_other.keys()):  # what one leaves out is the default
        if not key.startswith("_") and config[key] != of_other[key]:
            raise ValueError(f"its transformer_2 has {key} {config.get(key)}, and its transformer {of_other.get(key)}")


# ---------------------------------------------------------------- transformers


def _is_single_file(transformer_path):
    return transformer_path is not None and transformer_path.lower().endswith(".safetensors")


def _names_in_file(transformer, names):
    """Return `{name in diffusers: name in a single file}`, of a file in the authors' layout or in diffusers' own.

    Raises:
        ValueError: It is in neither.
    """
    expected, names = set(transformer.state_dict()), {name: name for name in names}
    try:
        renamed = SINGLE_FILE_LOADABLE_CLASSES[type(transformer).__name__]["checkpoint_mapping_fn"](dict(names))
    except Exception as error:  # whatever an unknown name leads it to
        raise ValueError(
            f"its tensors are in no layout that diffusers reads ({type(error).__name__}: {error})"
        ) from None
    return max(names, renamed, key=lambda names: len(expected & names.keys()))


def _renamed(transformer, tensors):
    """Return the tensors of a single file by their names in diffusers; one whose name is taken keeps its own."""
    names = _names_in_file(transformer, tensors)
    taken = tensors.keys() - names.values()
    return {name: tensors[name] for name in taken} | {name: tensors[own] for name, own in names.items()}


def load_transformer(
    model_class, pretrained_model_name_or_path, *, dtype, transformer_path=None, subfolder="transformer", **hub
):
    """Load a transformer on the CPU.

    Args:
        transformer_path (`str`, *optional*):
            A `transformer/` folder, or one safetensors file in the layout of the model's authors or of diffusers,
            that replaces the one of the pipeline.
        subfolder (`str`): Where the pipeline has it.
    """
    if transformer_path is None:
        return model_class.from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, dtype=dtype, **hub)
    if not _is_single_file(transformer_path):
        return model_class.from_pretrained(transformer_path, dtype=dtype)
    # Not by `from_single_file`, which in bf16 rounds what `from_pretrained` keeps in fp32. Such a file has no config;
    # that of the pipeline tells how large the model is.
    transformer = load_transformer_skeleton(
        model_class, pretrained_model_name_or_path, transformer_path=transformer_path, subfolder=subfolder, **hub
    )
    tensors = _renamed(transformer, read_tensors(transformer_path))
    state_dict = {
        name: tensors[name].to(_dtype_as_loaded(model_class, name, dtype)) for name in transformer.state_dict()
    }
    transformer.load_state_dict(state_dict, assign=True)
    return transformer.eval()


def _dtype_as_loaded(model_class, name, dtype):
    """Return the dtype that `from_pretrained` gives to a parameter, which may not be the `dtype` asked for."""
    return torch.float32 if set(model_class._keep_in_fp32_modules or ()) & set(name.split(".")) else dtype


def _without_memory(model_class, config, dtype):
    with init_empty_weights():
        transformer = model_class.from_config(config)
    for name, parameter in transformer.named_parameters():
        parameter.data = parameter.data.to(_dtype_as_loaded(model_class, name, dtype))
    return transformer


def load_transformer_skeleton(
    model_class,
    pretrained_model_name_or_path,
    *,
    dtype=torch.float32,
    transformer_path=None,
    subfolder="transformer",
    **hub,
):
    """Build a transformer from its config alone, without memory for its weights, to inspect names, shapes and dtypes.

    Raises:
        OSError: There is no such folder or file.
        ValueError: The config is that of another class, or of a model with other inputs than that of the pipeline.
    """
    hub.pop("variant", None)  # names weights, not configs
    if transformer_path is not None and not os.path.exists(transformer_path):
        raise OSError(f"there is no {'file' if _is_single_file(transformer_path) else 'folder'} {transformer_path}")
    config = of_pipeline = _load_config(model_class, pretrained_model_name_or_path, subfolder, **hub)
    if transformer_path is not None and not _is_single_file(transformer_path):
        if os.path.isfile(transformer_path):
            raise ValueError(f"{transformer_path} is neither a folder nor a file that ends in .safetensors")
        config = _load_config(model_class, transformer_path)
        for key in _INTERFACE:
            if config.get(key) != of_pipeline.get(key):
                raise ValueError(
                    f"the transformer in {transformer_path} has {key} {config.get(key)}, and that of the pipeline, "
                    f"which it is to replace, {of_pipeline.get(key)}"
                )
    with built_from(subfolder):
        return _without_memory(model_class, config, dtype)


def describe(transformer):
    """Return the config of a transformer as a `dict` of what makes it this model, without where it came from."""
    return {key: value for key, value in transformer.config.items() if not key.startswith("_")}


@built_from("scheduler")
def load_scheduler(scheduler_class, pretrained_model_name_or_path, **hub):
    """Load a scheduler, whose config states how sigmas are shifted."""
    hub.pop("variant", None)  # there are no weights to choose from
    return scheduler_class.from_pretrained(pretrained_model_name_or_path, subfolder="scheduler", **hub)
