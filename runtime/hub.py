"""Whether a name is one on the Hugging Face hub, and whether it is to be had from there."""

import os

from huggingface_hub import HfApi, errors, is_offline_mode
from huggingface_hub.utils import validate_repo_id


def is_hub_id(text):
    """Return whether a text can be a hub id, `name` or `owner/name`; else it is a path and nothing else."""
    try:
        validate_repo_id(text)
    except errors.HFValidationError:
        return False
    return True


def why_not_on_hub(name, kind, revision=None):
    """Ask the hub for a repository; return a sentence on why it is not to be had from there, or None.

    Args:
        name (`str`): Of what is no folder here.
        kind (`str`): `"model"` or `"dataset"`.
        revision (`str`, *optional*)
    """
    here, api = f"there is no folder {os.path.abspath(name)}", HfApi()
    if is_offline_mode():
        return f"{here}, it was not fetched from the hub before, and HF_HUB_OFFLINE=1 keeps it from being asked for"
    try:
        api.repo_info(name, repo_type=kind, revision=revision, timeout=10)
    except errors.RepositoryNotFoundError:
        return f"{here}, and no {kind} of that name on {api.endpoint} (or only for those who are logged in)"
    except errors.RevisionNotFoundError:
        return f"{here}, and the {kind} of that name on {api.endpoint} has no revision {revision}"
    except (errors.HTTPError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, errors.HfHubHTTPError):
            return f"{here}, and {api.endpoint} does not give it: {reason}"
        return f"{here}, and the hub cannot be reached to look for it there ({api.endpoint}: {reason})"
    return None
