"""A cache of measurements that hold until the machine changes: files, one per subject and machine.

`MGPU_CORE_CACHE` names the folder, or says `off`; the default is `mgpu_core` in the user's cache folder.  Files are
replaced whole.  One that cannot be read, or is about another machine, is as good as none; where nothing can be
written, the answer lives as long as the process.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from mgpu_core.support.files import write_whole

__all__ = ["VARIABLE", "cache_folder", "load", "store"]

VARIABLE = "MGPU_CORE_CACHE"
_FORMAT = "mgpu_core cache 1"
_remembered: dict[tuple[str, str], Any] = {}  # subject, key -> value


def cache_folder() -> Path | None:
    """Return the folder of the files; ``None`` if the cache is off, or its home folder does not exist."""
    wanted = os.environ.get(VARIABLE, "").strip()
    if wanted.lower() == "off":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(wanted).expanduser() if wanted else Path(base).expanduser() / "mgpu_core"
    except RuntimeError:
        return None


def load(subject: str, key: dict[str, Any]) -> Any | None:
    """Return the value stored under this subject and key, by this process or another, or ``None``."""
    text = _text(key)
    if (subject, text) in _remembered:
        return _remembered[subject, text]
    path = _path(subject, text)
    try:
        stored = json.loads(path.read_text()) if path is not None else {}
        if stored.get("format") != _FORMAT or _text(stored["key"]) != text:
            return None
        value = stored["value"]
    except (OSError, ValueError, AttributeError, KeyError, RecursionError):
        return None
    _remembered[subject, text] = value
    return value


def store(subject: str, key: dict[str, Any], value: Any) -> None:
    """Keep a value that JSON can hold; in this process alone if no file can be written."""
    text = _text(key)
    _remembered[subject, text] = value
    path = _path(subject, text)
    if path is None:
        return
    content = json.dumps({"format": _FORMAT, "key": key, "value": value}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda stream: stream.write(content.encode()))
    except OSError:
        return


def forget() -> None:
    """Forget this process's values; files stay."""
    _remembered.clear()


def _text(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _path(subject: str, text: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / f"{subject}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
