"""Google Cloud's metadata server, which tells a machine about itself. It is the same for machines and TPU VMs.

https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

import http.client
import os
import pathlib
import time

_SERVER = "169.254.169.254"  # of every machine there; GCE_METADATA_HOST names another, as for Google's libraries
_ANSWER_S = 2.0
_BOOT_S, _PAUSE_S = 20.0, 1.0  # how long, and how often, a machine of Google's asks until the server answers
# https://cloud.google.com/compute/docs/instances/detect-compute-engine
_PRODUCT = pathlib.Path("/sys/class/dmi/id/product_name")
ERRORS = (OSError, http.client.HTTPException)  # of `ask`


def ask(key: str, tag: str | None = None, wait_s: int = 60) -> tuple[str, str]:
    """The value of a key below instance/, and its tag.

    Args:
        key: the key.
        tag: of the value that is known: the answer comes when there is another one, or after `wait_s`; None: at once.
        wait_s: see `tag`.

    Raises:
        FileNotFoundError: the server does not have this key.
        OSError, http.client.HTTPException: no answer, or not one of this server, as on any machine elsewhere.
    """
    # Not urllib, which would send the question to a proxy.
    wait, timeout = "", _ANSWER_S
    if tag is not None:
        wait, timeout = f"?wait_for_change=true&last_etag={tag}&timeout_sec={wait_s}", wait_s + _ANSWER_S
    connection = http.client.HTTPConnection(os.environ.get("GCE_METADATA_HOST", _SERVER), timeout=timeout)
    try:
        connection.request("GET", f"/computeMetadata/v1/instance/{key}{wait}", headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        if answer.status == http.client.NOT_FOUND:
            raise FileNotFoundError(key)
        if answer.status != http.client.OK or answer.getheader("Metadata-Flavor") != "Google":
            raise OSError(f"answer {answer.status}")
        return answer.read().decode(errors="replace").strip(), answer.getheader("ETag", "0")
    finally:
        connection.close()


def ask_patiently(key: str) -> str:
    """The value of a key below instance/; at boot the server of a machine of Google's may not answer at once.

    Raises:
        OSError, http.client.HTTPException: as `ask`, on a machine of Google's after some seconds.
    """
    deadline = time.monotonic() + (_BOOT_S if is_googles_machine() else 0.0)
    while True:
        try:
            return ask(key)[0]
        except FileNotFoundError:
            raise
        except ERRORS:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_PAUSE_S)


def is_googles_machine() -> bool:
    """Whether this is a machine of Google Cloud, as its firmware says."""
    try:
        return _PRODUCT.read_text().startswith("Google")
    except OSError:
        return False
