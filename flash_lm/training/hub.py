"""Uploads exports to the Hugging Face hub, and downloads `hub:OWNER/NAME` as a folder of an export."""

import contextlib
import fnmatch
import os
import pathlib
from collections.abc import Iterator

from flash_lm.errors import InputError, first_line
from flash_lm.runs.run_folder import is_export
from flash_lm.runs.run_name import HUB, RunName, run_name

_CACHED, _COMMIT = "models--", 12  # how the library names the folder of a model's copies; characters of a commit
_FILES = ("*.safetensors", "*.json", "tokenizer/*", "README.md")  # of an export
# Of other libraries' models; pickles are left out where there may be safetensors.
_FOREIGN_FILES = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja", "merges.txt", "README.md")
_REPLACED = (*_FILES, "*.stablehlo")  # by an upload, where they are not in other folders


def make_repository(name: str, *, private: bool) -> None:
    """Creates a repository if it does not exist.

    Args:
        name: OWNER/NAME.
        private: whether a new repository can be read by its owner alone.

    Raises:
        InputError: the name is wrong, nobody is logged in, there is no permission, or the hub does not answer.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 (slow to import)

    if name.count("/") != 1:  # the hub would take a name without an owner, and then not find it
        raise InputError(f"{name} is no name of a model on the hub: give OWNER/NAME")
    with _explain_errors(name):
        HfApi().create_repo(name, private=private, exist_ok=True)


def push(folder: pathlib.Path, name: str) -> str:
    """Uploads an export to an existing repository, in place of an older one.

    Args:
        folder: folder of the export.
        name: of the repository, OWNER/NAME.

    Returns:
        The URL of the upload.

    Raises:
        InputError: as `make_repository` does.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 (slow to import)

    with _explain_errors(name):
        # An index of shards, or the labels of a classifier, must not stay next to weights of another model.
        old = [file for file in HfApi().list_repo_files(name) if _is_replaced(file)]
        commit = HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message="Exported by flash_lm", delete_patterns=old
        )
    return str(commit)


def download(name: str | os.PathLike[str] | RunName) -> RunName:
    """Downloads hub:OWNER/NAME if the name has this form, and returns the name of the local copy; others are parsed.

    Raises:
        InputError: there is no such model, no access to it, it is no export of flash_lm, or the hub does not answer and
            there is no copy.
    """
    name = run_name(name)
    if not str(name.workdir).startswith(HUB):
        return name
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow to import)

    # The files of an export only: a repository may have others, such as weights in another format.
    repository = str(name.workdir).removeprefix(HUB)
    if name.suffix:
        raise InputError(f"{name} is an exported model, which has one state: leave {name.suffix} out")
    with _explain_errors(repository):
        folder = pathlib.Path(snapshot_download(repository, allow_patterns=list(_FILES)))
    if not is_export(folder) or not (folder / "tokenizer").is_dir():
        raise InputError(
            f"{HUB}{repository} is no export of flash_lm: convert it with flash-lm import --model={HUB}{repository} "
            "--out=FOLDER"
        )
    return name._replace(workdir=folder)


def download_foreign(name: str) -> pathlib.Path:
    """Downloads a model of another library, named hub:OWNER/NAME, and returns the folder of the local copy.

    Raises:
        InputError: there is no such model, no access to it, or the hub does not answer and there is no copy.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow to import)

    repository = name.removeprefix(HUB)
    with _explain_errors(repository):
        return pathlib.Path(snapshot_download(repository, allow_patterns=list(_FOREIGN_FILES)))


def _is_replaced(file: str) -> bool:
    return any(fnmatch.fnmatch(file, x) and file.count("/") == x.count("/") for x in _REPLACED)


def hub_name(folder: pathlib.Path) -> str | None:
    """OWNER/NAME@COMMIT of a folder in the hub's local cache; None: the folder is elsewhere."""
    owner, mark, name = folder.parent.parent.name.removeprefix(_CACHED).partition("--")
    if folder.parent.name != "snapshots" or not folder.parent.parent.name.startswith(_CACHED) or not mark:
        return None
    return f"{owner}/{name}@{folder.name[:_COMMIT]}"


@contextlib.contextmanager
def _explain_errors(name: str) -> Iterator[None]:
    """Turns the library's errors into one line that says what to change."""
    from huggingface_hub import errors  # noqa: PLC0415 (slow to import)

    try:
        yield
    except errors.HFValidationError as error:
        raise InputError(f"{name} is no name of a model on the hub ({first_line(error)}): give OWNER/NAME") from None
    except errors.LocalTokenNotFoundError:
        raise InputError("nobody is logged in to the hub: run hf auth login, or set HF_TOKEN") from None
    except (errors.GatedRepoError, errors.RepositoryNotFoundError):
        raise InputError(f"there is no model {name} on the hub, or no access to it: check name and HF_TOKEN") from None
    except errors.LocalEntryNotFoundError:
        raise InputError(f"the hub cannot be reached, and there is no copy of {name}: connect, and try again") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        known = {401: "the token is not valid: run hf auth login, or set HF_TOKEN", 403: "the token may not do this"}
        raise InputError(f"the hub refuses {name} ({status}): {known.get(status, first_line(error))}") from None
    except (ConnectionError, TimeoutError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        raise InputError(f"the hub cannot be reached ({first_line(error)}): connect, and try again") from None
    except OSError as error:  # a full disk, a folder without permission
        raise InputError(f"the files of {name} cannot be read or written: {first_line(error)}") from None
