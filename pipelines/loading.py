"""What every model family reads the same way: transformers as they lie in a pipeline folder or beside it, schedulers.

The first argument of each function is the class of the transformer or scheduler; `hub` is `revision` and `variant`, as
`from_pretrained` takes them.
"""

import glob
import os

from accelerate import init_empty_weights
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors import SafetensorError, safe_open


def _is_single_file(transformer_path):
    return transformer_path is not None and transformer_path.endswith(".safetensors")


def load_transformer(
    model_class, pretrained_model_name_or_path, *, dtype, transformer_path=None, subfolder="transformer", **hub
):
    """Load a transformer on the CPU.

    Args:
        transformer_path (`str`, *optional*):
            A `transformer/` folder, or one safetensors file in the layout of the model's authors, that replaces the
            one of the pipeline.
        subfolder (`str`): Where the pipeline has it.
    """
    if transformer_path is None:
        return model_class.from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, dtype=dtype, **hub)
    if _is_single_file(transformer_path):
        # Such a file has no config; that of the pipeline says how large the model is.
        return model_class.from_single_file(
            transformer_path, config=pretrained_model_name_or_path, subfolder=subfolder, dtype=dtype
        )
    return model_class.from_pretrained(transformer_path, dtype=dtype)


def load_transformer_skeleton(
    model_class, pretrained_model_name_or_path, *, transformer_path=None, subfolder="transformer", **hub
):
    """Build a transformer from its config alone, without memory for its weights, to look at names and counts.

    Raises:
        OSError: There is no such folder or file.
        ValueError: The config is that of another class.
    """
    hub.pop("variant", None)  # names weights, not configs
    if transformer_path is None or _is_single_file(transformer_path):
        if transformer_path is not None and not os.path.isfile(transformer_path):
            raise OSError(f"there is no file {transformer_path}")
        config = model_class.load_config(pretrained_model_name_or_path, subfolder=subfolder, **hub)
    else:
        config = model_class.load_config(transformer_path)
    name = config.get("_class_name", model_class.__name__)
    if name != model_class.__name__:
        raise ValueError(f"its transformer is a {name}; allowed is {model_class.__name__}")
    with init_empty_weights():
        return model_class.from_config(config)


def check_weights(skeleton, pretrained_model_name_or_path, *, transformer_path=None, subfolder="transformer"):
    """Check from the headers of safetensors files on this machine that they hold every tensor of the transformer.

    Args:
        skeleton: From `load_transformer_skeleton`.

    Raises:
        OSError: There is no such file.
        ValueError: Tensors are missing, and would be trained from random values.
    """
    if transformer_path is None and not os.path.isdir(pretrained_model_name_or_path):
        return  # on the hub, whose files come with an index of their own
    path = transformer_path or os.path.join(pretrained_model_name_or_path, subfolder)
    files = [path] if os.path.isfile(path) else sorted(glob.glob(os.path.join(path, "*.safetensors")))
    if not files:
        raise OSError(f"there is no safetensors file in {path}")
    names = set()
    for file in files:
        try:
            with safe_open(file, "pt") as content:
                names.update(content.keys())
        except SafetensorError as error:
            raise ValueError(f"{file} is not a safetensors file ({error})") from None
    held = len(names)
    if _is_single_file(transformer_path):
        # Named as diffusers will name them when it loads the file.
        rename = SINGLE_FILE_LOADABLE_CLASSES[type(skeleton).__name__]["checkpoint_mapping_fn"]
        names = set(rename(dict.fromkeys(names)))
    expected = skeleton.state_dict()
    missing = [name for name in expected if name not in names]
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} of {len(expected)} tensors, such as {missing[0]}; it holds {held}, "
            f"such as {min(names, default='none')}"
        )


def load_scheduler(scheduler_class, pretrained_model_name_or_path, **hub):
    """Load a scheduler, whose config says how sigmas are shifted."""
    hub.pop("variant", None)  # there are no weights to choose from
    return scheduler_class.from_pretrained(pretrained_model_name_or_path, subfolder="scheduler", **hub)
