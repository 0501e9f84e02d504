"""The model card, what is uploaded with it, and what is refused before training."""

import argparse
import json
import re
import shlex
import shutil
import sys
import types

import httpx2
import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants, metadata_load
from huggingface_hub.utils._http import default_client_factory

from runtime.errors import FailedError, RefusedError
from training.export import LORA_FILE
from training.hub import open_repository, push
from training.model_card import write_model_card


TOKEN = "hf_notarealtoken"
ALONE = types.SimpleNamespace(num_processes=1, is_main_process=True)


def stage(name=None, subfolder="transformer", number=0):
    return types.SimpleNamespace(name=name, subfolder=subfolder, number=number)


ONE = (stage(),)
BOTH = (stage("high_noise"), stage("low_noise", "transformer_2", number=1))


def arguments(output_dir, **changed):
    settings = {
        "output_dir": str(output_dir),
        "pretrained_model_name_or_path": "Qwen/Qwen-Image",
        "revision": None,
        "variant": None,
        "transformer_path": None,
        "training_mode": "lora",
        "lora_rank": 4,
        "lora_target_modules": ["to_q", "to_out.0"],
        "lora_init_path": None,
        "optimizer": "torch.optim.Adam",
        "optimizer_args": {"betas": (0.9, 0.95)},
        "timestep_sampling": "logit_normal",
        "loss_weighting": "sigma_sqrt",
        "min_sigma": 0.1,
        "lora_dropout": 0.0,
        "ema": True,
        "ema_decay": 0.999,
        "deterministic": False,
        "seed": 42,
        "validation_prompt": ["a cat", "a dog"],
        "push_to_hub": True,
        "hub_model_id": None,
        "cache_dir": str(output_dir / "cache"),
    }
    return argparse.Namespace(**settings | changed)


def make_output(folder, *results, suffix=".png", steps=(5, 20)):
    """Fill a folder as runs do: results, records with paths, a cache, checkpoints, previews."""
    files = dict.fromkeys(results, b"weights")
    secret = str(folder).encode()
    for name in ("run.json", "dataset.jsonl", "events.out.tfevents.1", "cache/README.md", "cache/index.json"):
        files[name] = secret
    for name in ("checkpoint-20/state.json", f"checkpoint-20/{LORA_FILE}", "logs/run/events.out.tfevents.1"):
        files[name] = secret
    for step in steps:
        for name in (f"prompt-00{suffix}", f"prompt-01{suffix}", f"prompt-02{suffix}", "grid.png"):
            files[f"validation/step-{step}/{name}"] = b"image"
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    lines = [{"step": step, "path": str(folder)} for step in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Pipeline:
    """Stands for the class of a stock pipeline."""


def write_card(args, stages=ONE, **changed):
    family = {
        "pipeline_class": Pipeline,
        "transformer_class": torch.nn.Linear,
        "image_arguments": (),
        "stages": stages,
    }
    family = types.SimpleNamespace(**{"is_video": False, **family, **changed})
    write_model_card(args, family, stages[-1], num_items=7)


@pytest.fixture
def uploaded(tmp_path, monkeypatch):
    """Folder that stands for the hub: the real client selects the files, and they are copied there."""
    there = tmp_path / "hub"

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, **others):
        for operation in self._prepare_upload_folder_additions(folder_path, "", allow_patterns=allow_patterns):
            path = there / repo_id / operation.path_in_repo
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(operation.path_or_fileobj, path)

    monkeypatch.setattr(HfApi, "_validate_yaml", lambda self, content, **_: ModelCard(content))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return there


def files_under(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- what is uploaded


@pytest.mark.parametrize(
    "mode, stages, results, left_over",
    [
        ("lora", ONE, [LORA_FILE], "transformer/config.json"),
        ("lora", BOTH, ["high_noise", "low_noise"], LORA_FILE),
        ("lora", BOTH[1:], ["low_noise"], f"high_noise/{LORA_FILE}"),
        ("full", ONE, ["transformer"], LORA_FILE),
        ("full", BOTH[1:], ["transformer_2"], "transformer/config.json"),
    ],
)
def test_results_are_uploaded_and_nothing_else(mode, stages, results, left_over, tmp_path, uploaded, capsys):
    """Compared with a list by hand; no file holds the path of the output folder, as the records of a run do."""
    folder = tmp_path / "out"
    if mode == "full":
        results = [
            f"{result}/{name}" for result in results for name in ("config.json", "model-00001-of-2.safetensors")
        ]
    else:
        results = [result if "." in result else f"{result}/{LORA_FILE}" for result in results]
    make_output(folder, *results, left_over)
    args = arguments(folder, training_mode=mode)
    write_card(args)
    push(ALONE, args, "me/out", stages)
    previews = {"validation/step-20/prompt-00.png", "validation/step-20/prompt-01.png"}
    assert files_under(uploaded / "me/out") == {"README.md", *results, *previews}
    for path in files_under(uploaded):
        assert str(tmp_path).encode() not in (uploaded / path).read_bytes(), path
    assert "me/out" in capsys.readouterr().out


def test_nothing_is_uploaded_without_the_flag(tmp_path, uploaded):
    args = arguments(tmp_path, push_to_hub=False)
    assert open_repository(ALONE, args) is None
    push(ALONE, args, None, ONE)
    assert not uploaded.exists()


def test_failed_upload_says_how_to_make_up_for_it(tmp_path, uploaded, monkeypatch):
    """The command is given to huggingface_hub's own command line, which must upload what was to be uploaded."""
    folder = tmp_path / "my out"
    make_output(folder, LORA_FILE)
    args = arguments(folder)
    write_card(args)
    with monkeypatch.context() as patch:

        def fail(self, **_):
            raise OSError("the line\nis dead")

        patch.setattr(HfApi, "upload_folder", fail)
        with pytest.raises(FailedError) as error:
            push(ALONE, args, "me/out", ONE)
    text, command = str(error.value).split("; to upload them later: ")
    assert text == f"The results are complete in {folder}, but were not uploaded to me/out: the line is dead"
    assert not uploaded.exists()

    from huggingface_hub.cli.hf import app

    created = []
    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: created.append(repo_id) or FakeUrl(repo_id))
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as end:
        app()
    assert not end.value.code and created == ["me/out"]
    previews = {"validation/step-20/prompt-00.png", "validation/step-20/prompt-01.png"}
    assert files_under(uploaded / "me/out") == {"README.md", LORA_FILE, *previews}


class FakeUrl(str):
    @property
    def repo_id(self):
        return str(self)


# ---------------------------------------------------------------- before training


class Hub:
    """The hub's answers as its real client sees them, for a token that may write to what is `mine`."""

    def __init__(self):
        self.requests, self.exists, self.broken = [], set(), None

    def answer(self, request):
        path = request.url.path
        self.requests.append(f"{request.method} {path}")
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        if self.broken is not None:
            return self.broken(request)
        if path == "/api/whoami-v2":
            return httpx2.Response(200, json={"name": "me"})
        if path == "/api/repos/create":
            content = json.loads(request.content)
            repo_id = f"{content['organization'] or 'me'}/{content['name']}"
            assert "visibility" not in content and "private" not in content, "as diffusers leaves it"
            if not repo_id.startswith("me/"):
                return httpx2.Response(403, json={"error": "no right to create there"})
            status = 409 if repo_id in self.exists else 200
            self.exists.add(repo_id)
            return httpx2.Response(status, json={"url": f"https://huggingface.co/{repo_id}"})
        repo_id = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(/auth-check/write)?", path)[1]
        if repo_id not in self.exists:
            return httpx2.Response(404, headers={"X-Error-Code": "RepoNotFound"})
        if path.endswith("/write") and not repo_id.startswith("me/"):
            return httpx2.Response(403, json={"error": "no right to write there"})
        return httpx2.Response(200, json={"id": repo_id})


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    transport = httpx2.MockTransport(hub.answer)
    huggingface_hub.set_client_factory(lambda: httpx2.Client(transport=transport))
    yield hub
    huggingface_hub.set_client_factory(default_client_factory)


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("hub_model_id, repo_id", [(None, "me/my_lora"), ("other", "me/other"), ("me/x", "me/x")])
def test_repository_is_opened(hub_model_id, repo_id, exists, hub, tmp_path):
    hub.exists |= {repo_id} if exists else set()
    assert open_repository(ALONE, arguments(tmp_path / "my_lora", hub_model_id=hub_model_id)) == repo_id
    assert repo_id in hub.exists and hub.requests[-1] == f"GET /api/models/{repo_id}/auth-check/write"


def refusal(args):
    with pytest.raises(RefusedError) as error:
        open_repository(ALONE, args)
    text = str(error.value)
    assert TOKEN not in text and "\n" not in text
    return text


def test_offline(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal(arguments(tmp_path)) and not hub.requests


def test_no_token(hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "no token was found; log in with `hf auth login`" in refusal(arguments(tmp_path)) and not hub.requests


def no_connection(request):
    raise httpx2.ConnectError("name or service not known")


@pytest.mark.parametrize(
    "broken, said",
    [
        (no_connection, "https://huggingface.co cannot be reached: name or service not known"),
        (lambda request: httpx2.Response(503), "https://huggingface.co cannot be reached: Server error '503"),
        (lambda request: httpx2.Response(401), "https://huggingface.co does not accept the token: Invalid user token"),
    ],
)
def test_hub_that_cannot_be_used(broken, said, hub, tmp_path):
    hub.broken = broken
    assert said in refusal(arguments(tmp_path))


@pytest.mark.parametrize("exists", [False, True])
def test_repository_of_others(exists, hub, tmp_path):
    """One that exists can be read, and then `create_repo` alone says nothing."""
    hub.exists |= {"others/x"} if exists else set()
    assert "does not allow writing to others/x" in refusal(arguments(tmp_path, hub_model_id="others/x"))


@pytest.mark.parametrize("hub_model_id", ["a b", "a/b/c", "--x"])
def test_impossible_name(hub_model_id, hub, tmp_path):
    text = refusal(arguments(tmp_path, hub_model_id=hub_model_id))
    assert text.startswith("--hub_model_id") and hub_model_id in text


# ---------------------------------------------------------------- the model card


def test_metadata(tmp_path):
    args = arguments(tmp_path)
    make_output(tmp_path)
    write_card(args)
    previews = [("a cat", "validation/step-20/prompt-00.png"), ("a dog", "validation/step-20/prompt-01.png")]
    assert metadata_load(tmp_path / "README.md") == {
        "base_model": "Qwen/Qwen-Image",
        "base_model_relation": "adapter",
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": ["text-to-image", "diffusers", "diffusers-training", "lora"],
        "widget": [{"text": prompt, "output": {"url": path}} for prompt, path in previews],
    }
    card = (tmp_path / "README.md").read_text()
    assert "\n<Gallery />\n" in card and "on 7 items, 20 optimizer steps." in card


def test_metadata_of_a_full_run_from_a_folder(tmp_path):
    """A local folder is no model of the hub, which would look for one of that name."""
    args = arguments(tmp_path / "out", training_mode="full", pretrained_model_name_or_path=str(tmp_path))
    make_output(tmp_path / "out")
    write_card(args)
    metadata = metadata_load(tmp_path / "out" / "README.md")
    assert "base_model" not in metadata and "base_model_relation" not in metadata
    assert "full-finetune" in metadata["tags"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| base_model | `{tmp_path.name}` |" in card and str(tmp_path) not in card
    write_card(arguments(tmp_path / "out", training_mode="full"))
    assert metadata_load(tmp_path / "out" / "README.md")["base_model_relation"] == "finetune"


def test_clips_are_shown_by_the_hub(tmp_path):
    make_output(tmp_path, suffix=".mp4")
    write_card(arguments(tmp_path, fps=16), is_video=True)
    path = "validation/step-20/prompt-01.mp4"
    metadata = metadata_load(tmp_path / "README.md")
    assert metadata["widget"][1]["output"]["url"] == path and metadata["pipeline_tag"] == "text-to-video"


@pytest.mark.parametrize("changed", [{"validation_prompt": None}, {"steps": ()}])
def test_card_without_previews(changed, tmp_path):
    make_output(tmp_path, steps=changed.pop("steps", (20,)))
    write_card(arguments(tmp_path, **changed))
    assert "widget" not in metadata_load(tmp_path / "README.md")
    assert "<Gallery />" not in (tmp_path / "README.md").read_text()


def test_settings(tmp_path):
    make_output(tmp_path / "out")
    (tmp_path / "old.safetensors").touch()
    write_card(arguments(tmp_path / "out", lora_init_path=str(tmp_path / "old.safetensors")))
    rows = re.findall(r"^\| (\w+) \| `(.*)` \|$", (tmp_path / "out" / "README.md").read_text(), re.MULTILINE)
    assert dict(rows) == {
        "base_model": "Qwen/Qwen-Image",
        "training_mode": "lora",
        "lora_rank": "4",
        "lora_dropout": "0.0",
        "lora_target_modules": '["to_q", "to_out.0"]',
        "lora_init_path": "old.safetensors",
        "optimizer": "torch.optim.Adam",
        "optimizer_args": '{"betas": [0.9, 0.95]}',
        "ema": "true",
        "ema_decay": "0.999",
        "timestep_sampling": "logit_normal",
        "min_sigma": "0.1",
        "loss_weighting": "sigma_sqrt",
        "seed": "42",
    }
    write_card(arguments(tmp_path / "out", optimizer=None))
    assert "| optimizer |" not in (tmp_path / "out" / "README.md").read_text()


PROMPTS = [
    "---\nlicense: mit\n---\n# no title",
    'key: "value" # no comment',
    "- {a: [b, *c, &d]} | 100% > !x @y `z`",
    "__init__ and *stars*, ~~gone~~, $x$, <b>bold</b> &amp; ![](x.png) [a](b) \\",
    "many words --- " * 20,
    "'single' \"double\" \u2028 äöü 猫 😺 \x07",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_special_characters(prompt, tmp_path):
    """The metadata is read back by huggingface_hub, the table by a parser of Markdown where there is one."""
    make_output(tmp_path)
    write_card(arguments(tmp_path, validation_prompt=[prompt, "a dog"], timestep_sampling=prompt))
    card = ModelCard.load(tmp_path / "README.md")
    line = " ".join(prompt.split())
    assert [entry["text"] for entry in card.data.widget] == [line, "a dog"]
    assert card.data.license is None and "\n# Qwen-Image LoRA\n" in card.text
    markdown_it = pytest.importorskip("markdown_it")
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(card.text)
    cells = [token for token in tokens if token.type == "inline"]
    at = next(n for n, token in enumerate(cells) if token.content == "timestep_sampling")
    (code,) = cells[at + 1].children
    assert code.type == "code_inline" and code.content.strip() == line.replace("`", "'")
    assert cells[at + 2].content == "min_sigma"


def test_card_does_not_depend_on_the_folder(tmp_path):
    contents = set()
    for name in ("one", "another"):
        make_output(tmp_path / name)
        write_card(arguments(tmp_path / name))
        contents.add((tmp_path / name / "README.md").read_bytes())
    (content,) = contents
    assert b"another" not in content and str(tmp_path).encode() not in content
