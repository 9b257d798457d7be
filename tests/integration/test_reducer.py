"""The reducer between processes: it gives what DistributedDataParallel gives over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_processes_get_what_distributed_data_parallel_gives(tmp_path: Path) -> None:
    """Within a rounding, and bit by bit the same on all members."""
    script = Path(__file__).parent / "scripts/reducer_ranks.py"
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        assert [rank.communicate(timeout=50)[0] for rank in ranks] == ["equal\n"] * 2
    finally:
        for rank in ranks:
            rank.kill()
