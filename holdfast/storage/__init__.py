"""Bytes at a URL. Knows no checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast.errors import ConfigError
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage

__all__ = ["open_storage"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OBJECT_STORE = re.compile(r"(s3|gs|gcs|az|azure|abfs|abfss):/", re.IGNORECASE)  # a Path has only one slash left


def open_storage(url: str | Path) -> Storage:
    """Returns the storage at a path or URL; nothing is read or written yet.

    Raises:
        ConfigError: there is no storage of this kind.
    """
    text = str(url)
    if _OBJECT_STORE.match(text):
        raise ConfigError(f"{text} is in an object store; these are not supported yet. Use a directory.")
    match = _URL.match(text)
    if match and match[1].lower() != "file":
        raise ConfigError(f"{text} has the unknown scheme {match[1]}://. Use a directory or a file:// URL.")
    if not text:
        raise ConfigError("the storage path is empty. Use a directory.")
    return LocalStorage(_path_of_file_url(text) if match else Path(text).expanduser())


def _path_of_file_url(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
        raise ConfigError(f"{url} names no directory of this machine. Write file:///absolute/path, with %3F for a ?.")
    return Path(unquote(parts.path)).expanduser()
