"""Leaves processes behind that no signal to its process group reaches, and looks for them in its next life."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def daemon() -> None:
    """The classic double fork: the grandchild has a session of its own and no living parent."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(f"daemon-{os.getpid()}").touch()
            time.sleep(600)
        os._exit(0)
    os.wait()


def runs(pid: str) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def main() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        daemon()
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        for env in (None, {}) if "--clean" in sys.argv else (None,):
            child = subprocess.Popen(command, start_new_session=True, env=env)
            Path(f"daemon-{child.pid}").touch()
        Path(f"ready-{os.environ['RANK']}").touch()
        time.sleep(600)
    alive = [path.name for path in Path().glob("daemon-*") if runs(path.name.removeprefix("daemon-"))]
    Path(f"found-{os.environ['RANK']}").write_text(" ".join(alive))


main()
