"""Where the folders of a run may lie, and how what is missing is reported."""

import os
import pathlib
import types

import pytest
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

import runtime.hub
from runtime.errors import RefusedError
from train_qwen_image import VALUES
from training.arguments import parse_args
from training.paths import check_paths


LORA_FILE = "pytorch_lora_weights.safetensors"


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Function that checks the paths of a run in a folder with a model, data and an earlier run."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "model/transformer",
        "data/sub",
        "more",
        "runs/1/transformer",
        "runs/1/checkpoint-3",
        "runs/1/validation",
    ):
        pathlib.Path(name).mkdir(parents=True)
    for name in (f"runs/1/{LORA_FILE}", "runs/1/dataset.jsonl", "runs/first.png"):
        pathlib.Path(name).touch()
    pathlib.Path("link").symlink_to("data")

    def run(*flags, config=None, **settings):
        settings = {
            "pretrained_model_name_or_path": "model",
            "dataset_path": "data",
            "output_dir": "runs/2",
        } | settings
        flags = [*flags, *(part for name, value in settings.items() if value for part in (f"--{name}", value))]
        if config is not None:
            pathlib.Path("config.yaml").write_text(config)
            flags += ["--config", "config.yaml"]
        check_paths(parse_args(flags, description="", values=VALUES))

    return run


FULL = ["--training_mode", "full"]


@pytest.mark.parametrize(
    "flags, settings",
    [
        ([], {}),
        ([], {"cache_dir": "runs/cache"}),  # that several runs share
        ([], {"cache_dir": "runs/2/cache"}),
        ([], {"cache_dir": "runs/2"}),
        ([], {"cache_dir": "data/.cache"}),  # which nobody reads as data
        ([], {"output_dir": "."}),
        ([], {"dataset_path": "data/sub", "output_dir": "data/run"}),
        ([], {"output_dir": "runs/1", "resume_from_checkpoint": "runs/1/checkpoint-3"}),
        ([], {"output_dir": "runs/1", "resume_from_checkpoint": "checkpoint-3"}),
        ([], {"transformer_path": "runs/1/transformer"}),
        ([], {"transformer_path": "runs/1/transformer", "output_dir": "runs/1"}),  # which a LoRA leaves as it is
        ([], {"lora_init_path": "runs/1", "output_dir": "runs/1/more"}),
        ([], {"lora_init_path": f"runs/1/{LORA_FILE}"}),
        ([], {"dataset_path": "runs/1/validation"}),
        ([], {"pretrained_model_name_or_path": "runs/../model/"}),
        (FULL, {"transformer_path": "runs/1/transformer"}),
    ],
)
def test_layouts_that_work(flags, settings, check):
    check(*flags, **settings)


@pytest.mark.parametrize(
    "flags, settings, said",
    [
        ([], {"output_dir": "data"}, "--output_dir data is --dataset_path data"),
        ([], {"output_dir": "data/../data/"}, "--output_dir data/../data/ is --dataset_path data"),
        ([], {"output_dir": "data/out"}, "--output_dir data/out lies in --dataset_path data"),
        ([], {"output_dir": "link/out"}, "--output_dir link/out lies in --dataset_path data"),
        ([], {"output_dir": "data/out", "dataset_path": "link"}, "--output_dir data/out lies in --dataset_path link"),
        ([], {"dataset_path": "."}, "--output_dir runs/2 lies in --dataset_path ."),
        ([], {"cache_dir": "data"}, "--cache_dir data is --dataset_path data"),
        ([], {"cache_dir": "link/cache"}, "--cache_dir link/cache lies in --dataset_path data"),
        ([], {"output_dir": "model"}, "--output_dir model is --pretrained_model_name_or_path model"),
        ([], {"output_dir": "model/vae/x"}, "--output_dir model/vae/x lies in --pretrained_model_name_or_path model"),
        ([], {"cache_dir": "model/cache"}, "--cache_dir model/cache lies in --pretrained_model_name_or_path model"),
        (
            FULL,
            {"transformer_path": "runs/1/transformer", "output_dir": "runs/1/transformer"},
            "--output_dir runs/1/transformer is --transformer_path runs/1/transformer",
        ),
        # What the run itself replaces.
        (
            FULL,
            {"transformer_path": "runs/1/transformer", "output_dir": "runs/1"},
            "--transformer_path runs/1/transformer would be replaced or deleted by the run, which writes its own "
            "transformer to --output_dir runs/1",
        ),
        (
            [],
            {"lora_init_path": "runs/1", "output_dir": "runs/1"},
            f"runs/1/{LORA_FILE} would be replaced",
        ),
        ([], {"lora_init_path": f"runs/1/{LORA_FILE}", "output_dir": "runs/1"}, f"own {LORA_FILE} to --output_dir"),
        ([], {"dataset_metadata": "runs/1/dataset.jsonl", "output_dir": "runs/1"}, "its own dataset.jsonl"),
        (
            [],
            {"dataset_path": "runs/1/validation", "output_dir": "runs/1"},
            "its own validation to --output_dir runs/1",
        ),
        ([], {"cache_dir": "runs/2/validation"}, "--cache_dir runs/2/validation would be replaced or deleted"),
        ([], {"cache_dir": "runs/2/checkpoint-5/c"}, "its own checkpoint-5 to --output_dir runs/2"),
        (
            [],
            {"cache_dir": "runs/2/transformer", "training_mode": "full"},
            "its own transformer to --output_dir runs/2",
        ),
        (
            [],
            {"cache_dir": "runs", "output_dir": "runs/media/x"},
            "--output_dir runs/media/x would be replaced or deleted by the run, which writes its own media to",
        ),
    ],
)
def test_folders_that_would_harm_each_other(flags, settings, said, check):
    with pytest.raises(RefusedError) as error:
        check(*flags, **settings)
    assert said in str(error.value) and "; give " in str(error.value)


def test_every_one_of_several_datasets_is_checked(check):
    config = "datasets:\n  - {dataset_path: more}\n  - {dataset_path: data}\n"
    check(config=config, dataset_path=None)
    with pytest.raises(RefusedError, match="--output_dir data/out lies in --dataset_path of dataset 2 data"):
        check(config=config, dataset_path=None, output_dir="data/out")
    with pytest.raises(RefusedError, match=r"--dataset_path of dataset 2 \./gone: there is no such folder"):
        check(config=config.replace("data}", "./gone}"), dataset_path=None)


# ---------------------------------------------------------------- what is not there


@pytest.mark.parametrize(
    "setting, path",
    [
        *(
            ("pretrained_model_name_or_path", path)
            for path in ("./gone", "/gone", "a/b/c", "gone/", "no such", "../x/y")
        ),
        *(("dataset_path", path) for path in ("./gone", "/gone/x", "a/b/c", "data/gone/", "two words")),
        *(("transformer_path", path) for path in ("gone", "owner/name", "runs/1/transformer.safetensors")),
        *(("lora_init_path", path) for path in ("gone", "owner/name", "./runs/2")),
    ],
)
def test_what_cannot_be_on_the_hub_is_refused_at_once(setting, path, check, monkeypatch):
    monkeypatch.setattr(runtime.hub, "HfApi", None)  # the hub is not asked
    with pytest.raises(RefusedError) as error:
        check(**{setting: path})
    message = str(error.value)
    assert (
        f"--{setting} {path}: there is no such f" in message
        and f"the full path is {os.path.abspath(path)}." in message
    )


def test_a_tilde_is_the_home_of_the_user(check, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    check(pretrained_model_name_or_path="~/model")
    with pytest.raises(RefusedError, match=f"--output_dir {tmp_path}/data lies in --dataset_path {tmp_path}:"):
        check(dataset_path=str(tmp_path), output_dir="~/data")


def test_a_file_is_no_pipeline_and_a_folder_has_no_revision(check):
    with pytest.raises(RefusedError, match="runs/first.png is a file; give the folder of a whole pipeline"):
        check(pretrained_model_name_or_path="runs/first.png")
    with pytest.raises(RefusedError, match=r"--revision has no effect with a folder \(model\)"):
        check(revision="main")


RESPONSE = types.SimpleNamespace(headers={}, request=None, status_code=500)


@pytest.mark.parametrize(
    "error, said",
    [
        (ConnectionError("no route"), "https://hub cannot be asked for it: no route"),
        (RepositoryNotFoundError("404", response=RESPONSE), "https://hub has no {kind} of that name"),
        (RevisionNotFoundError("404", response=RESPONSE), "the {kind} of that name on https://hub has no revision"),
        (HfHubHTTPError("500", response=RESPONSE), "https://hub cannot be asked for it: 500"),
        (None, None),
    ],
)
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_what_may_be_on_the_hub_is_asked_for_once(kind, error, said, check, monkeypatch, tmp_path):
    asked = []

    def ask(name, *, repo_type, revision, timeout):
        asked.append((name, repo_type, timeout <= 10))
        if error is not None:
            raise error

    hub = types.SimpleNamespace(endpoint="https://hub", repo_info=ask)
    monkeypatch.setattr(runtime.hub, "HfApi", lambda: hub)
    monkeypatch.setattr(runtime.hub, "is_offline_mode", lambda: False)
    found = runtime.hub.why_not_on_hub("owner/name", kind)
    assert asked == [("owner/name", kind, True)]
    if said is None:
        assert found is None
    else:
        assert (
            found.startswith(f"there is no folder {tmp_path / 'owner/name'}, and ") and said.format(kind=kind) in found
        )
    if kind == "model" and said is not None:
        with pytest.raises(RefusedError, match="--pretrained_model_name_or_path owner/name: there is no folder"):
            check(pretrained_model_name_or_path="owner/name")


def test_a_deliberate_lack_of_a_connection_is_reported(check):
    with pytest.raises(RefusedError, match="not downloaded from the hub before, and HF_HUB_OFFLINE=1 forbids asking"):
        check(pretrained_model_name_or_path="owner/name")
