"""Fetch one file and keep it only when it is exactly the expected one."""

import hashlib
import http.client
import urllib.error
import urllib.request
from pathlib import Path

from config.errors import UserError
from data.files import written_whole


def download(url: str, path: Path, *, sha256: str, size: int) -> None:
    """Download to `path`, which appears whole and checked or not at all.

    Args:
        url: http or https.
        path: where the file goes.
        sha256, size: what the file must be, size in bytes.

    Raises:
        UserError: no network, a status other than 200, another size or another hash.
    """
    advice = "get the file in another way and name its path instead"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read(size + 1)
    except urllib.error.HTTPError as error:
        raise UserError(f"{url}: the server answered {error.code} {error.reason}; {advice}") from None
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{url}: cannot be downloaded ({getattr(error, 'reason', error)}); {advice}") from None
    if len(content) != size or hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{url}: what arrived is not the expected file of {size:,} bytes; {advice}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as file:
        file.write(content)
