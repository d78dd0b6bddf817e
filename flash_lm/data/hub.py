"""The Hugging Face hub: whether it is reachable, and its library's errors in one line."""

import contextlib
import http.client
import logging
import os
import ssl
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator

from flash_lm.config.data import DataConfig
from flash_lm.errors import InputError

_HUB_TIMEOUT = 5  # seconds


@contextlib.contextmanager
def explain_errors(config: DataConfig) -> Iterator[None]:
    """Turns the library's errors into one line that says what to change, and silences its log messages.

    Raises:
        InputError: instead of the library's exceptions.
    """
    import datasets  # noqa: PLC0415 (slow to import)
    from datasets.exceptions import DatasetNotFoundError, DatasetsError  # noqa: PLC0415

    # Errors name the key that the user has set.
    source = f"data.name={config.name}" if config.name else f"data.path={config.path}"
    datasets.logging.set_verbosity(logging.CRITICAL + 1)
    if not config.name:  # a download should show its progress
        datasets.disable_progress_bars()
    try:
        yield
    except InputError:
        raise
    except DatasetNotFoundError:
        raise InputError(f"{source}: no such data set on the hub, or no access to it: check the name") from None
    # Of broken files: the library and those that it calls raise these, too.
    except (OSError, EOFError, ValueError, RuntimeError, StopIteration, zlib.error, DatasetsError) as error:
        if config.name and is_offline() and isinstance(error, OSError):
            raise InputError(
                f"{source} is not on this machine and the hub cannot be reached: connect, set --config.data.path to "
                f"local files, or use text that every machine has with --config.data.corpus=stdlib"
            ) from None
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:300] or "there are no rows in its files, or they are damaged"
        raise InputError(f"cannot load {source}: {reason}") from None


def is_offline() -> bool:
    """Whether the library is set to offline mode."""
    return os.environ.get("HF_HUB_OFFLINE") == "1"


def is_reachable() -> bool:
    """Whether the hub answers at all within seconds."""
    # In a thread, since an address lookup has no timeout, and a name may have many addresses.
    answers = []

    def ask() -> None:
        endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_HUB_TIMEOUT).close()
        except urllib.error.URLError as error:
            # A refusal or an unknown certificate is an answer, too.
            if not isinstance(error, urllib.error.HTTPError) and not isinstance(error.reason, ssl.SSLError):
                return
        except (TimeoutError, ConnectionError):
            return
        except (ValueError, http.client.HTTPException):
            pass  # an invalid endpoint: the library has its own message for it
        answers.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_TIMEOUT)
    return bool(answers)
