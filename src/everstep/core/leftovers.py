"""What processes leave behind that were killed at a bad moment."""

from __future__ import annotations

from pathlib import Path


def unlink_shared(pid: int) -> None:
    """Files of a dead process in /dev/shm: memory that torch shares has a name there for a moment, as a rule."""
    for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
        left.unlink(missing_ok=True)
