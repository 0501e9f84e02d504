"""What every model family reads the same way: transformers as they lie in a pipeline folder or beside it, schedulers.

The first argument of each function is the class of the transformer or scheduler; `hub` is `revision` and `variant`, as
`from_pretrained` takes them.
"""

import glob
import os

import safetensors.torch
import torch
from accelerate import init_empty_weights
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors import SafetensorError, safe_open


# What the rest of a pipeline prepares for its transformer: one that replaces it must be fed the same.
_INTERFACE = ("patch_size", "in_channels", "out_channels", "text_dim", "joint_attention_dim", "image_dim")
_INTERFACE += ("pos_embed_seq_len",)


def _is_single_file(transformer_path):
    return transformer_path is not None and transformer_path.lower().endswith(".safetensors")


def _names_in_file(transformer, names):
    """Return `{name in diffusers: name in a single file}`, of a file in the authors' layout or in diffusers' own."""
    names = {name: name for name in names}
    if set(transformer.state_dict()) <= set(names):
        return names
    return SINGLE_FILE_LOADABLE_CLASSES[type(transformer).__name__]["checkpoint_mapping_fn"](names)


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
    # that of the pipeline says how large the model is.
    transformer = load_transformer_skeleton(
        model_class, pretrained_model_name_or_path, transformer_path=transformer_path, subfolder=subfolder, **hub
    )
    tensors = safetensors.torch.load_file(transformer_path)
    names = _names_in_file(transformer, tensors)
    state_dict = {
        name: tensors[names[name]].to(_dtype_as_loaded(model_class, name, dtype)) for name in transformer.state_dict()
    }
    transformer.load_state_dict(state_dict, assign=True)
    return transformer.eval()


def _dtype_as_loaded(model_class, name, dtype):
    """Return the dtype that `from_pretrained` gives to a parameter, which may not be the `dtype` asked for."""
    return torch.float32 if set(model_class._keep_in_fp32_modules or ()) & set(name.split(".")) else dtype


def _without_memory(model_class, config, dtype, **changes):
    with init_empty_weights():
        transformer = model_class.from_config(config, **changes)
    for name, parameter in transformer.named_parameters():
        parameter.data = parameter.data.to(_dtype_as_loaded(model_class, name, dtype))
    return transformer


def shrink(skeleton, *, dtype):
    """Return a skeleton like this one, with three blocks in its list or fewer if it has fewer."""
    num_layers = min(skeleton.config.num_layers, 3)
    return _without_memory(type(skeleton), skeleton.config, dtype, num_layers=num_layers)


def load_transformer_skeleton(
    model_class,
    pretrained_model_name_or_path,
    *,
    dtype=torch.float32,
    transformer_path=None,
    subfolder="transformer",
    **hub,
):
    """Build a transformer from its config alone, without memory for its weights, to look at names, shapes and dtypes.

    Raises:
        OSError: There is no such folder or file.
        ValueError: The config is that of another class, or of a model with other inputs than that of the pipeline.
    """
    hub.pop("variant", None)  # names weights, not configs
    if _is_single_file(transformer_path) and not os.path.isfile(transformer_path):
        raise OSError(f"there is no file {transformer_path}")
    config = of_pipeline = model_class.load_config(pretrained_model_name_or_path, subfolder=subfolder, **hub)
    if transformer_path is not None and not _is_single_file(transformer_path):
        config = model_class.load_config(transformer_path)
        for key in _INTERFACE:
            if config.get(key) != of_pipeline.get(key):
                raise ValueError(
                    f"the transformer in {transformer_path} has {key} {config.get(key)}, and that of the pipeline, "
                    f"which it is to replace, {of_pipeline.get(key)}"
                )
    name = config.get("_class_name", model_class.__name__)
    if name != model_class.__name__:
        raise ValueError(f"its transformer is a {name}; allowed is {model_class.__name__}")
    return _without_memory(model_class, config, dtype)


def describe(transformer):
    """Return the config of a transformer as a `dict` of what makes it this model, without where it came from."""
    return {key: value for key, value in transformer.config.items() if not key.startswith("_")}


def check_weights(skeleton, pretrained_model_name_or_path, *, transformer_path=None, subfolder="transformer"):
    """Check from the headers of safetensors files on this machine that they hold every tensor of the transformer.

    Args:
        skeleton: From `load_transformer_skeleton`.

    Raises:
        OSError: There is no such file.
        ValueError: Tensors are missing, and would be trained from random values, or have another shape.
    """
    if transformer_path is None and not os.path.isdir(pretrained_model_name_or_path):
        return  # on the hub, whose files come with an index of their own
    path = transformer_path or os.path.join(pretrained_model_name_or_path, subfolder)
    files = [path] if os.path.isfile(path) else sorted(glob.glob(os.path.join(glob.escape(path), "*.safetensors")))
    if not files:
        raise OSError(f"there is no safetensors file in {path}")
    shapes = {}
    for file in files:
        try:
            with safe_open(file, "pt") as content:
                shapes |= {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}
        except SafetensorError as error:
            raise ValueError(f"{file} is not a safetensors file ({error})") from None
    held, example = len(shapes), min(shapes, default="none")
    if _is_single_file(transformer_path):
        shapes = {name: shapes[original] for name, original in _names_in_file(skeleton, shapes).items()}
    expected = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} of {len(expected)} tensors, such as {missing[0]}; it holds {held}, such as "
            f"{example}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(f"in {path} {name} has the shape {shapes[name]}, and the model has {shape}")


def load_scheduler(scheduler_class, pretrained_model_name_or_path, **hub):
    """Load a scheduler, whose config says how sigmas are shifted."""
    hub.pop("variant", None)  # there are no weights to choose from
    return scheduler_class.from_pretrained(pretrained_model_name_or_path, subfolder="scheduler", **hub)
