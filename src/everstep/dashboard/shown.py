"""What a person asked to see of a worker, from the run folder, where the job's controller put it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from everstep.core.sampled import Sampled
from everstep.observe import flame

MOST = 256 << 10  # characters of stacks


def shown(run: Path, answer: Mapping[str, Any]) -> dict[str, Any]:
    """`ok` in words, `file` where it lies, `notes`, and `text` or `picture` (observe.flame.Picture)."""
    told = {"ok": answer["summary"], "file": answer["file"], "notes": list(answer["notes"].values())}
    path = run / answer["file"]
    try:
        if answer["what"] == "profile":
            sampled = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Sampled)
            return told | {"picture": msgspec.to_builtins(flame.picture(sampled))}
        return told | {"text": path.read_text(encoding="utf-8", errors="replace")[:MOST]}
    except (OSError, msgspec.DecodeError) as error:
        return told | {"text": f"{answer['file']} cannot be read: {error}"}
