"""Files that the dashboard hands out: the page's own, and an incident's evidence and logs from the run folder."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import msgspec

STATIC = Path(__file__).with_name("static")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
OPEN = ("incidents", "logs")  # folders of a run folder that may be read
NEWEST_BYTES = 256 << 10


class Asset(msgspec.Struct, frozen=True):
    body: bytes
    media_type: str
    tag: str  # changes with its content


def assets() -> dict[str, Asset]:
    """The page's files by name, read once: no request opens a file of this package."""
    found = {}
    for path in sorted(STATIC.iterdir()):
        if path.suffix in TYPES:
            body = path.read_bytes()
            found[path.name] = Asset(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return found


def newest_text(run_dir: Path, name: str) -> bytes | None:
    """The last 256 KB of a regular file below the folders that may be read; None when it is none of those.

    Where it lies is asked of the file that was opened: neither dots nor links lead elsewhere, whoever moves them.
    """
    if name.split("/")[0] not in OPEN or "\0" in name:
        return None
    try:
        fd = os.open(run_dir / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        there = Path(os.readlink(f"/proc/self/fd/{fd}"))
        status = os.fstat(fd)
        folders = [(run_dir / folder).resolve() for folder in OPEN]
        if not stat.S_ISREG(status.st_mode) or not any(there.is_relative_to(folder) for folder in folders):
            return None
        data = os.pread(fd, NEWEST_BYTES, max(0, status.st_size - NEWEST_BYTES))
    finally:
        os.close(fd)
    return data.decode("utf-8", "replace").encode()
