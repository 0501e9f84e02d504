"""Files of weights: which of a folder are read, and whether each tensor in them has a place and a dtype that is cast.

All is told from headers: tensors are mapped, and of their values only samples are read.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re

import torch
from diffusers import ModelMixin
from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from runtime.files import refuse_pointer
from runtime.hub import fetched_folder


# What loaders cast to the dtype that they are asked for. Integers would be quantised weights.
_CAST = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
# What published encoders hold and nothing here reads: positions, the only integers, and what CLIP compares texts with.
_UNREAD = re.compile(r"(^|\.)position_ids$|^visual_projection\.weight$")

_NUM_SAMPLED = 2048
_WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".msgpack", ".h5", ".onnx", ".pt", ".pth", ".ckpt", ".gguf")


def find_folder(pretrained_model_name_or_path, revision=None):
    """Return the folder of a pipeline: the path itself, or where a fetched one from the hub is.

    Raises:
        OSError: It is not on this machine.
    """
    if os.path.isdir(pretrained_model_name_or_path):
        return str(pretrained_model_name_or_path)
    folder = fetched_folder(pretrained_model_name_or_path, revision)
    if folder is None:
        raise OSError("its model_index.json is not among the files that were fetched")
    return folder


def weights_identity(pretrained_model_name_or_path, parts, digests, *, revision=None, variant=None):
    """Return what tells parts of a pipeline from those of others, for keys of what they encode.

    For a pipeline from the hub it is the commit: weights may be fetched later. For a folder it is `digests`, the sizes
    of files of weights (which tell precisions apart), and the content of all other files.

    Args:
        parts (`tuple[str, ...]`): Such as `("text_encoder", "tokenizer")`.
        digests (`dict[str, str]`): Of the weights of each part, from `loading.check_weights`.
        revision, variant (`str`, *optional*): As `from_pretrained` takes them.

    Returns:
        `dict` of values that JSON takes.

    Raises:
        OSError: The pipeline is not on this machine.
    """
    root = pathlib.Path(find_folder(pretrained_model_name_or_path, revision))
    if not os.path.isdir(pretrained_model_name_or_path):
        return {"commit": root.name, "parts": list(parts), "variant": variant}
    files = {}
    for path in sorted(path for part in parts for path in (root / part).rglob("*") if path.is_file()):
        is_weights = path.suffix.lower() in _WEIGHTS_SUFFIXES
        content = path.stat().st_size if is_weights else hashlib.sha256(path.read_bytes()).hexdigest()
        files[path.relative_to(root).as_posix()] = content
    return {"files": files, "weights": [digests.get(part) for part in parts], "variant": variant}


def read_tensors(file):
    """Return the tensors of a safetensors or .bin file by name, mapped and not read.

    Raises:
        OSError: There is no such file.
        ValueError: It is no such file, is cut short, or is a pointer of Git LFS.
    """
    refuse_pointer(file)
    try:
        if pathlib.Path(file).suffix.lower() != ".safetensors":
            return dict(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
        with safe_open(file, "pt") as content:
            return {name: content.get_tensor(name) for name in content.keys()}
    except SafetensorError as error:
        raise ValueError(f"{file} is cut short or not a safetensors file ({error})") from None
    except Exception as error:  # whatever unpickling leads to
        raise ValueError(f"{file} is cut short or holds no tensors ({type(error).__name__})") from None


def check_small_file(path):
    """Check that a config or a file of a tokenizer is here itself, and a JSON object where its name says so.

    Raises:
        ValueError: It is not.
    """
    refuse_pointer(path)
    if pathlib.Path(path).suffix == ".json":
        try:
            content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is cut short or not JSON ({error})") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path} is not a JSON object")


def find_weights(folder, model_class, variant=None):
    """Return the files that `from_pretrained` reads of a folder; none if it has no weights.

    Args:
        folder (`str`)
        model_class (`type`): Of diffusers or Transformers, which name files differently.
        variant (`str`, *optional*): As `from_pretrained` takes it.
    """
    folder, infix = pathlib.Path(folder), f".{variant}" if variant else ""
    of_diffusers = issubclass(model_class, ModelMixin)
    for ending in ("safetensors", "bin"):
        stem = "diffusion_pytorch_model" if of_diffusers else {"safetensors": "model", "bin": "pytorch_model"}[ending]
        index = folder / f"{stem}.{ending}.index{infix}.json"
        one = folder / f"{stem}{infix}.{ending}"
        if one.is_file() and not (of_diffusers and index.is_file()):
            return [one]
        if index.is_file():
            refuse_pointer(index)
            try:
                content = json.loads(index.read_text("utf-8"))
                content["metadata"]  # which loaders look into
                return sorted({folder / name for name in content["weight_map"].values()})
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{index} is not an index of weights ({error!r})") from None
    return []


def read_files(files):
    """Return the tensors of all files by name.

    Raises:
        ValueError: A file is missing, is none of weights, or holds what another one does.
    """
    tensors = {}
    for file in files:
        if not os.path.isfile(file):
            raise ValueError(f"{file} is missing, which the index next to it names")
        of_file = read_tensors(file)
        if twice := tensors.keys() & of_file:
            raise ValueError(f"{file} and another file of the same weights both hold {min(twice)}")
        tensors |= of_file
    return tensors


def check_tensors(where, tensors, skeleton):
    """Check that weights in the names of diffusers are those of a model.

    Args:
        where (`str`): For messages.
        tensors (`dict[str, torch.Tensor]`): From `read_files`.
        skeleton (`ModelMixin`): On the meta device.

    Returns:
        `dict[str, torch.Tensor]`: Those that have a place.

    Raises:
        ValueError: A tensor is missing, has no place, another shape, or a dtype that is not cast.
    """
    expected = skeleton.state_dict()
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(
            f"{where} lacks {len(missing)} of {len(expected)} tensors, such as {missing[0]}; it holds {len(tensors)}, "
            f"such as {min(tensors, default='none')}"
        )
    ignored = skeleton._keys_to_ignore_on_load_unexpected or ()
    unplaced = [name for name in tensors if name not in expected and not any(re.search(p, name) for p in ignored)]
    _refuse_unplaced(where, unplaced, type(skeleton))
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            _refuse_shape(where, name, tensors[name].shape, tensor.shape)
        if tensors[name].dtype != tensor.dtype:
            _refuse_other_dtypes(where, name, tensors[name])
    return {name: tensors[name] for name in expected}


def check_text_model(where, tensors, model_class, config):
    """Check that weights are those of a model of Transformers, by its own loading of them without their values.

    Args:
        where (`str`), tensors (`dict[str, torch.Tensor]`): As `check_tensors` takes them, in any names that
            Transformers converts.
        model_class (`type`), config (`PreTrainedConfig`)

    Raises:
        ValueError: See `check_tensors`.
    """
    without_values = {}
    for name, tensor in tensors.items():
        if not _UNREAD.search(name):
            _refuse_other_dtypes(where, name, tensor)
            without_values[name] = torch.empty_like(tensor, device="meta")
    with _quiet_transformers():
        _, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=without_values,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{where} lacks {len(missing)} tensors of {model_class.__name__}, such as {missing[0]}; it holds "
            f"{len(tensors)}, such as {min(tensors, default='none')}"
        )
    _refuse_unplaced(where, sorted(info["unexpected_keys"]), model_class)
    for mismatch in info["mismatched_keys"]:
        _refuse_shape(where, *mismatch)


def digest_tensors(tensors):
    """Return the digest of weights: of their shapes, and of samples of each tensor rounded to bf16.

    The same weights have the same one in whatever files, names and dtypes they lie; a few megabytes are read.
    """
    return hashlib.sha256("".join(sorted({_digest_tensor(tensor) for tensor in tensors})).encode()).hexdigest()


def _digest_tensor(tensor):
    values = tensor.reshape(-1)
    if len(values) > 3 * _NUM_SAMPLED:
        starts = (0, (len(values) - _NUM_SAMPLED) // 2, len(values) - _NUM_SAMPLED)
        values = torch.cat([values[start : start + _NUM_SAMPLED] for start in starts])
    sampled = values.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    return hashlib.sha256(f"{tuple(tensor.shape)}".encode() + sampled).hexdigest()


def _refuse_unplaced(where, unplaced, model_class):
    if unplaced:
        raise ValueError(
            f"{where} holds {len(unplaced)} tensors that have no place in this {model_class.__name__}, such as "
            f"{unplaced[0]}: they belong to another model, or to a quantised one"
        )


def _refuse_shape(where, name, shape, expected):
    raise ValueError(f"in {where} {name} has the shape {tuple(shape)}, and the model has {tuple(expected)}")


def _refuse_other_dtypes(where, name, tensor):
    if tensor.dtype not in _CAST:
        allowed = ", ".join(_name_of(dtype) for dtype in _CAST)
        raise ValueError(f"in {where} {name} is {_name_of(tensor.dtype)}; weights are read as {allowed}")


def _name_of(dtype):
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def _quiet_transformers():
    """Context in which Transformers draws no bar and reports no weights: what is found is logged here."""
    before, had_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if had_bar:
            logging.enable_progress_bar()
