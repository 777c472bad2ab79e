"""Downloads the files of a model from Cloud Storage. Rendered into the image of Vertex AI.

    python3 fetch_model.py gs://BUCKET/PREFIX FOLDER

Vertex AI copies the model's artifacts into a bucket of its own and names it in AIP_STORAGE_URI; a container
downloads them itself. The token is that of the machine's service account. STORAGE_EMULATOR_HOST and
GCE_METADATA_HOST name other servers, as for Google's own clients.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path, PurePosixPath
from typing import Any

TIMEOUT_S = 60.0


def fetch(uri: str, folder: Path) -> int:
    """Download all objects under a gs:// address. Returns their number.

    Raises ValueError for an address that names none, and OSError if a download fails.
    """
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme != "gs" or not parts.netloc:
        raise ValueError(f"{uri!r} is not an address; accepted: gs://BUCKET/PREFIX")
    prefix = parts.path.strip("/") + "/" if parts.path.strip("/") else ""
    server = os.environ.get("STORAGE_EMULATOR_HOST", "https://storage.googleapis.com").rstrip("/")
    token = _token()
    names = _names(server, parts.netloc, prefix, token)
    for name in names:
        relative = PurePosixPath(name.removeprefix(prefix))
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"the object {name!r} would be written outside of {folder}")
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        quoted = urllib.parse.quote(name, safe="")
        url = f"{server}/storage/v1/b/{parts.netloc}/o/{quoted}?alt=media"
        with _open(url, token) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file, 1 << 20)
            # http.client reports no error if the connection ends too early.
            if answer.length:
                raise OSError(f"{name} is not complete: the connection ended {answer.length} bytes early")
    if not names:
        raise ValueError(f"{uri} holds no file")
    return len(names)


def _names(server: str, bucket: str, prefix: str, token: str) -> list[str]:
    """Return the names of all objects, over all pages of the listing."""
    names: list[str] = []
    query = {"prefix": prefix, "fields": "items(name),nextPageToken"}
    while True:
        url = f"{server}/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(query)}"
        with _open(url, token) as answer:
            page = json.load(answer)
        names += [item["name"] for item in page.get("items", []) if not item["name"].endswith("/")]
        if not page.get("nextPageToken"):
            return names
        query["pageToken"] = page["nextPageToken"]


def _token() -> str:
    """Return the access token of the machine's service account."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return str(json.load(answer)["access_token"])


def _open(url: str, token: str) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def main() -> int:
    """Run the program. Returns its exit status."""
    try:
        count = fetch(sys.argv[1], Path(sys.argv[2]))
    except (ValueError, OSError, http.client.HTTPException) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    print(f"fetch_model: {count} files in {sys.argv[2]}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
