"""Whether a name can be one on the Hugging Face hub, and whether the hub has it."""

import os

from huggingface_hub import HfApi, errors, is_offline_mode, try_to_load_from_cache
from huggingface_hub.utils import validate_repo_id


def is_hub_id(text):
    """Return whether a text can be a hub id, `name` or `owner/name`. Otherwise it can only be a path."""
    try:
        validate_repo_id(text)
    except errors.HFValidationError:
        return False
    return True


def fetched_folder(name, revision=None):
    """Return where a pipeline from the hub is on this machine, a folder named by its commit; None if it is not."""
    index = try_to_load_from_cache(name, "model_index.json", revision=revision)
    return os.path.dirname(index) if isinstance(index, str) else None


def why_not_on_hub(name, kind, revision=None):
    """Ask the hub for a repository. Return a sentence on why it is not available there, or None.

    Args:
        name (`str`): It is no folder on this machine.
        kind (`str`): `"model"` or `"dataset"`.
        revision (`str`, *optional*)
    """
    api = HfApi()
    try:
        if is_offline_mode():
            reason = "it was not downloaded from the hub before, and HF_HUB_OFFLINE=1 forbids asking the hub"
        else:
            api.repo_info(name, repo_type=kind, revision=revision, timeout=10)
            return None
    except errors.RepositoryNotFoundError:
        reason = f"{api.endpoint} has no {kind} of that name (or shows it only to users who are logged in)"
    except errors.RevisionNotFoundError:
        reason = f"the {kind} of that name on {api.endpoint} has no revision {revision}"
    except (errors.HTTPError, OSError) as error:
        reason = f"{api.endpoint} cannot be asked for it: {' '.join(str(error).split()) or type(error).__name__}"
    return f"there is no folder {os.path.abspath(name)}, and {reason}"
