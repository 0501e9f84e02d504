"""The model card of a result: README.md, for readers and for the Hugging Face hub."""

import json
import pathlib

import yaml

from runtime.files import write_text
from training.flags import FIXED, ROWS, SHOWN
from training.metrics import read_metrics


MODEL_CARD = """---
{metadata}---

# {title}

Trained with Blockwise on {num_items} items, {num_steps} optimizer steps{each}.

```python
{usage}
```
{previews}
| setting | value |
|---|---|
{settings}
"""


# What stock `load_lora_weights` needs for a transformer of this name.
LOAD_OPTIONS = {"transformer": {}, "transformer_2": {"load_into_transformer_2": True}}


def write_model_card(args, family, stage, *, num_items):
    """Write README.md, the model card of the results that are there once `stage` is done.

    Args:
        args (`argparse.Namespace`), family (`Family`), stage (`Stage`)
        num_items (`int`): Of the dataset.
    """
    output_dir = pathlib.Path(args.output_dir)
    is_lora = args.training_mode == "lora"
    base_model = portable_name(args.pretrained_model_name_or_path)
    tag = f"{'image' if family.image_arguments else 'text'}-to-{'video' if family.is_video else 'image'}"
    tags = [tag, "diffusers", "diffusers-training", "lora" if is_lora else "full-finetune"]
    metadata = {"library_name": "diffusers", "pipeline_tag": tag, "tags": tags}
    if not pathlib.Path(args.pretrained_model_name_or_path).exists():  # a folder's name would be no model on the hub
        metadata |= {"base_model": base_model, "base_model_relation": "adapter" if is_lora else "finetune"}
    previews = shown_previews(args)
    if previews:
        metadata["widget"] = [{"text": _one_line(prompt), "output": {"url": path}} for path, prompt in previews]
    lines = read_metrics(output_dir / "metrics.jsonl")
    names = [name for name, flag in ROWS.items() if flag.change in (FIXED, SHOWN)]
    given = {"base_model": base_model} | {name: getattr(args, name, None) for name in names}
    text = MODEL_CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True),
        title=f"{base_model.rpartition('/')[2]} {'LoRA' if is_lora else 'fine-tune'}",
        num_items=num_items,
        num_steps=sum(line.get("expert") == stage.name for line in lines),
        each=" for each expert" if getattr(args, "expert", None) == "both" else "",
        usage="\n".join(_usage(args, family, family.stages[: stage.number + 1])),
        previews="\n<Gallery />\n" if previews else "",  # the hub shows there what the metadata has as widget
        settings="\n".join(_row(name, value) for name, value in given.items() if value not in (None, {})),
    )
    write_text(output_dir / "README.md", text)


def _usage(args, family, stages):
    """Yield the lines of Python that load the results of `stages` into the stock pipeline and sample from it."""
    is_lora, name = args.training_mode == "lora", json.dumps(portable_name(args.pretrained_model_name_or_path))
    pipeline, transformer = family.pipeline_class.__name__, family.transformer_class.__name__
    yield f"import torch\nfrom diffusers import {pipeline if is_lora else f'{transformer}, {pipeline}'}"
    if helpers := ["encode_video"] * family.is_video + ["load_image"] * bool(family.image_arguments):
        yield f"from diffusers.utils import {', '.join(helpers)}"
    is_folder = pathlib.Path(args.pretrained_model_name_or_path).exists()
    yield "\nbase_model = " + (f'"FOLDER_OF_THE_BASE_MODEL"  # it was called {name}' if is_folder else name)
    parts = {key: json.dumps(vars(args)[key]) for key in ("revision", "variant") if vars(args)[key]}
    if is_lora and args.transformer_path is not None:
        yield f"# trained with another transformer in it: {json.dumps(portable_name(args.transformer_path))}"
    for stage in [] if is_lora else stages:
        folder = f"FOLDER_OF_THIS_FILE/{stage.subfolder}"
        yield f'{stage.subfolder} = {transformer}.from_pretrained("{folder}", dtype=torch.bfloat16)'
        parts[stage.subfolder] = stage.subfolder
    yield f"pipe = {pipeline}.from_pretrained(base_model, {_keywords(parts)}dtype=torch.bfloat16)"
    for stage in stages if is_lora else []:
        folder = pathlib.PurePosixPath("FOLDER_OF_THIS_FILE", stage.name or "")
        options = "".join(f", {key}={value}" for key, value in LOAD_OPTIONS[stage.subfolder].items())
        yield f'pipe.load_lora_weights("{folder}"{options})'
    yield 'pipe.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")\n'
    prompt = (args.validation_prompt or ["what the image shows"])[0]
    settings = {"prompt": json.dumps(prompt, ensure_ascii=False)}
    settings |= {name: f'load_image("{name.upper()}.png")' for name in family.image_arguments}
    sizes = {name: getattr(args, name, None) for name in ("height", "width", "num_frames")}
    settings |= {name: size for name, size in sizes.items() if size is not None}
    sample = f"pipe({_keywords(settings).removesuffix(', ')})"
    if family.is_video:
        yield f'frames = {sample}.frames[0]\nencode_video(frames, fps={round(args.fps)}, output_path="video.mp4")'
    else:
        yield f'image = {sample}.images[0]\nimage.save("image.png")'


def _keywords(values):
    return "".join(f"{name}={value}, " for name, value in values.items())


def shown_previews(args):
    """Return the previews that the card shows, those of the newest step: their paths in the output folder, prompts."""
    output_dir = pathlib.Path(args.output_dir)
    steps = [path.name.removeprefix("step-") for path in output_dir.glob("validation/step-*")]
    newest = max((int(step) for step in steps if step.isdecimal()), default=0)
    return [
        (path.relative_to(output_dir).as_posix(), prompt)
        for number, prompt in enumerate(getattr(args, "validation_prompt", None) or ())
        for path in output_dir.glob(f"validation/step-{newest}/prompt-{number:02d}.*")
    ]


def portable_name(pretrained_model_name_or_path):
    """Return a hub id as it is, and the name of a local folder: no path of this machine goes into a result."""
    path = pathlib.Path(pretrained_model_name_or_path)
    return path.resolve().name if path.exists() else pretrained_model_name_or_path


def _row(name, value):
    """Return a row of the table of settings: code, so that Markdown leaves the value as it is."""
    if name in ("transformer_path", "lora_init_path"):
        value = portable_name(value)
    text = _one_line(value if isinstance(value, str) else json.dumps(value))
    text = text.replace("`", "'").replace("|", r"\|")
    return f"| {name} | `{text}` |"


def _one_line(text):
    return " ".join(text.split())
