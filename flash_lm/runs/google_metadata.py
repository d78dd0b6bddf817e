"""Google Cloud's metadata server, which tells a machine about itself. It is the same for machines and TPU VMs.

https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

import http.client
import os

_SERVER = "169.254.169.254"  # of every machine there; GCE_METADATA_HOST names another, as for Google's libraries
_ANSWER_S = 2.0
ERRORS = (OSError, http.client.HTTPException)  # of `ask`


def ask(key: str, tag: str | None = None, wait_s: int = 60) -> tuple[str, str]:
    """The value of a key below instance/, and its tag.

    Args:
        key: the key.
        tag: of the value that is known: the answer comes when there is another one, or after `wait_s`; None: at once.
        wait_s: see `tag`.

    Raises:
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
        if answer.status != http.client.OK or answer.getheader("Metadata-Flavor") != "Google":
            raise OSError(f"answer {answer.status}")
        return answer.read().decode(errors="replace").strip(), answer.getheader("ETag", "0")
    finally:
        connection.close()
