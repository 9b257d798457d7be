"""In the first attempt rank 1 never comes to the process group; rank 0 waits for it there, deaf to SIGTERM."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch.distributed as dist


def main() -> None:
    rank = os.environ["RANK"]
    signal.signal(signal.SIGTERM, lambda *_: None)
    if os.environ["EVERSTEP_EPOCH"] == "1":
        Path(f"waiting-{rank}").touch()
        if rank == "1":
            time.sleep(600)
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()


main()
