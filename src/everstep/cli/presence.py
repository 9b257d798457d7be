"""controller.json of a run folder: where the job's controller listens, and whether the job's launcher still lives.

The launcher locks that file for its life, and the kernel takes the lock from it whatever it dies of. File systems that
hosts share do not all carry locks between them. So a held lock shows anywhere that the launcher lives, but a free one
shows its death only on the machine where it ran, and only until that machine is started again.
"""

from __future__ import annotations

import fcntl
import socket
from pathlib import Path
from typing import BinaryIO

import msgspec

NAME = "controller.json"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of the kernel: containers on one machine share it


class Address(msgspec.Struct, frozen=True):
    """What controller.json holds. `machine` and `boot`: where the launcher runs, empty in old run folders."""

    host: str
    port: int
    job: str
    token_file: str
    tls_cert: str
    machine: str = ""
    boot: str = ""


def publish(run_dir: Path, address: Address) -> BinaryIO:
    """Write it for this machine. The launcher is taken for living while the file that is returned is open."""
    here = msgspec.structs.replace(address, machine=socket.gethostname(), boot=_boot())
    file = (run_dir / NAME).open("w+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(msgspec.json.encode(here))
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def read(run_dir: Path) -> Address | None:
    """None when the folder has none: somebody copied the journal alone. Raises msgspec.DecodeError."""
    try:
        text = (run_dir / NAME).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(text, type=Address)


def launcher_lives(run_dir: Path, address: Address) -> bool | None:
    """Whether the job's launcher lives; None when that cannot be told from this machine."""
    with (run_dir / NAME).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False if address.boot and address.boot == _boot() else None


def _boot() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except FileNotFoundError:  # no such kernel: then no free lock proves anything
        return ""
