"""The model card of a result: README.md, for readers and for the Hugging Face hub."""

import json
import pathlib
import re

import yaml

from runtime.files import write_text
from training.flags import ROWS
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


def write_model_card(args, *, base_model, pipeline_tag, num_items, usage):
    """Write README.md, the model card of the result.

    Args:
        args (`argparse.Namespace`)
        base_model (`str`): Hub id or name.
        pipeline_tag (`str`): The task, as the hub names it.
        num_items (`int`): Of the dataset.
        usage (`str`): Python code that loads the result.
    """
    output_dir = pathlib.Path(args.output_dir)
    is_lora = args.training_mode == "lora"
    metadata = {}
    if not pathlib.Path(args.pretrained_model_name_or_path).exists():  # a folder's name would be no model on the hub
        metadata |= {"base_model": base_model, "base_model_relation": "adapter" if is_lora else "finetune"}
    metadata |= {"library_name": "diffusers", "pipeline_tag": pipeline_tag}
    metadata["tags"] = [pipeline_tag, "diffusers", "diffusers-training", "lora" if is_lora else "full-finetune"]
    previews = shown_previews(args)
    if previews:
        metadata["widget"] = [{"text": _one_line(prompt), "output": {"url": path}} for path, prompt in previews]
    lines = read_metrics(output_dir / "metrics.jsonl")
    shown = {
        name: _setting(name, getattr(args, name, None))
        for name, flag in ROWS.items()
        if flag.in_card or not flag.may_change
    }
    settings = {"base_model": base_model} | shown
    text = MODEL_CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True),
        title=_escaped(f"{base_model.rpartition('/')[2]} {'LoRA' if is_lora else 'fine-tune'}"),
        num_items=num_items,
        num_steps=sum(line.get("expert") == lines[-1].get("expert") for line in lines),
        each=" for each expert" if getattr(args, "expert", None) == "both" else "",
        usage=usage,
        previews=_preview_table(previews),
        settings="\n".join(f"| {name} | {_escaped(text)} |" for name, text in settings.items() if text),
    )
    write_text(output_dir / "README.md", text)


def shown_previews(args):
    """Return the previews that the card shows, those of the newest step: their paths in the output folder, prompts."""
    output_dir = pathlib.Path(args.output_dir)
    prompts = getattr(args, "validation_prompt", None)
    if not prompts:
        return []
    # Those of later steps are what an earlier, longer run left in this folder.
    last_step = read_metrics(output_dir / "metrics.jsonl")[-1]["step"]
    names = [path.name.removeprefix("step-") for path in output_dir.glob("validation/step-*")]
    newest = max((int(name) for name in names if name.isdecimal() and int(name) <= last_step), default=0)
    paths = [
        (f"validation/step-{newest}/prompt-{number:02d}{suffix}", prompt)
        for number, prompt in enumerate(prompts)
        for suffix in (".png", ".mp4")
    ]
    return [(path, prompt) for path, prompt in paths if (output_dir / path).is_file()]


def portable_name(pretrained_model_name_or_path):
    """Return a hub id as it is, and of a local folder its name: no path of this machine goes into a result."""
    path = pathlib.Path(pretrained_model_name_or_path)
    return path.resolve().name if path.exists() else pretrained_model_name_or_path


def _preview_table(previews):
    if not previews:
        return ""
    lines = ["", "| preview | prompt |", "|---|---|"]
    for path, prompt in previews:
        # Markdown shows images only: clips are linked, and the hub's own element shows them from the metadata.
        shown = f"![]({path})" if path.endswith(".png") else f"[{pathlib.PurePosixPath(path).name}]({path})"
        lines.append(f"| {shown} | {_escaped(prompt)} |")
    if previews[0][0].endswith(".mp4"):
        lines = ["", "<Gallery />", *lines]
    return "\n".join([*lines, ""])


def _setting(name, value):
    """Return the text of a setting; none of what is off."""
    if value is None or value is False or value == {}:
        return ""
    if name in ("transformer_path", "lora_init_path"):
        return portable_name(value)
    if name == "bucket_config":
        return json.dumps(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={entry!r}" for key, entry in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)


def _one_line(text):
    return " ".join(text.split())


def _escaped(text):
    """Return a text as Markdown that shows it as it is, in a line of its own or in the cell of a table."""
    # An underscore within a word means nothing, and the names of settings stay readable.
    return re.sub(r"[\\`*\[\]<>&|~$!#]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", _one_line(text))
