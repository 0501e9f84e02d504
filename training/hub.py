"""The result on the Hugging Face hub: a repository that can be written, before training; the upload, at the end."""

import pathlib
import shlex

from huggingface_hub import HfApi, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from runtime.errors import FailedError, RefusedError
from runtime.hub import is_hub_id
from runtime.processes import on_main_process
from training.export import LORA_FILE
from training.model_card import shown_previews


def open_repository(accelerator, args):
    """Return the id of the repository for the result, which is made if it is new. Every process must call it.

    Args:
        accelerator (`Accelerator`), args (`argparse.Namespace`)

    Returns:
        `str`, or None without --push_to_hub.

    Raises:
        RefusedError: There is no token, the hub cannot be reached, or it does not let this token write there.
    """
    return on_main_process(accelerator, lambda: _open(args)) if args.push_to_hub else None


def _open(args):
    if is_offline_mode():
        raise RefusedError("--push_to_hub has no effect with HF_HUB_OFFLINE=1; remove one of the two.")
    if get_token() is None:
        raise RefusedError("--push_to_hub: no token was found; log in with `hf auth login`, or set HF_TOKEN.")
    api = HfApi()
    repo_id = args.hub_model_id or pathlib.Path(args.output_dir).resolve().name
    if not is_hub_id(repo_id):
        found = f"--hub_model_id {repo_id} (default: the name of the output folder)"
        raise RefusedError(f"{found} is no hub id; give 'name' or 'owner/name'.")
    refused = f"{api.endpoint} does not accept the token"
    try:
        api.whoami()
        refused = f"the token does not allow writing to {repo_id}"
        repo_id = api.create_repo(repo_id, exist_ok=True).repo_id
        api.auth_check(repo_id, write=True)  # for `create_repo` it is enough that a repository can be read
    except (HTTPError, OSError) as error:
        if not isinstance(error, HfHubHTTPError) or error.response.status_code >= 500:
            refused = f"{api.endpoint} cannot be reached"
        raise RefusedError(f"--push_to_hub: {refused}: {' '.join(str(error).split())}") from None
    return repo_id


def push(accelerator, args, repo_id, stages):
    """Upload what others need: the results, their model card, and the previews that it shows. Every process calls it.

    All else, such as the record of the run, holds paths of this machine.

    Args:
        accelerator (`Accelerator`), args (`argparse.Namespace`)
        repo_id (`str` or None): From `open_repository`; without one nothing is done.
        stages (`tuple[Stage]`): Those that the run trained.

    Raises:
        FailedError: The upload failed. The results are complete.
    """
    if repo_id is not None:
        on_main_process(accelerator, lambda: _upload(args, repo_id, stages))


def _upload(args, repo_id, stages):
    if args.training_mode == "full":
        patterns = [f"{stage.subfolder}/*" for stage in stages]
    else:
        patterns = [str(pathlib.PurePath(stage.name or "", LORA_FILE)) for stage in stages]
    patterns += ["README.md", *(path for path, _ in shown_previews(args))]
    api = HfApi()
    try:
        api.upload_folder(repo_id=repo_id, folder_path=args.output_dir, allow_patterns=patterns)
    except Exception as error:  # whatever it is: what took days is done, and only this is to be done again
        command = ["hf", "upload", repo_id, args.output_dir, "."]
        command += [word for pattern in patterns for word in ("--include", pattern)]
        raise FailedError(
            f"The results are complete in {args.output_dir}, but were not uploaded to {repo_id}: "
            f"{' '.join(str(error).split()) or type(error).__name__}; to upload them later: {shlex.join(command)}"
        ) from error
    print(f"uploaded to {api.endpoint}/{repo_id}")
