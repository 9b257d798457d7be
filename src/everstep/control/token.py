"""The job's token: a secret in a file, and the proof that somebody holds it without ever sending it.

Who connects must know the token, and so must who is connected to: each side sends a fresh random nonce and answers
with an HMAC over both. The label of the side keeps one side's proof from being sent back to it as its own.
"""

from __future__ import annotations

import enum
import hmac
import os
import secrets
import stat
from pathlib import Path

from everstep.core import proof
from everstep.core.errors import UsageError
from everstep.core.wire import Challenge, Hello

NUM_BYTES = 32  # of a token we make
MIN_CHARS = 32  # of a token somebody else made: 128 bits in hex
MAX_CHARS = 4096


class Side(bytes, enum.Enum):
    CLIENT = b"everstep client"
    SERVER = b"everstep server"


def create_token(path: Path) -> bytes:
    """A new random token in a new file only its owner can read. Raises UsageError when the file exists."""
    token = secrets.token_hex(NUM_BYTES).encode()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UsageError(f"token file {path} exists already: use it, or remove it first") from error
    except OSError as error:
        raise UsageError(f"cannot create token file {path}: {error.strerror}") from error
    with open(fd, "wb") as file:
        file.write(token + b"\n")
    return token


def read_token(path: Path) -> bytes:
    """The token in a file. Raises UsageError when it is missing, too short, or readable by others."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            token = file.read(MAX_CHARS + 1).strip()
    except OSError as error:
        raise UsageError(f"cannot read token file {path}: {error.strerror}") from error
    if mode & 0o077:
        raise UsageError(f"token file {path} can be used by others (mode {mode:04o}): chmod 600 {path}")
    if not MIN_CHARS <= len(token) <= MAX_CHARS:
        raise UsageError(
            f"token file {path} holds {len(token)} characters, a token has {MIN_CHARS} to {MAX_CHARS}; "
            f"`openssl rand -hex 32` makes one"
        )
    return token


def links_secret(token: bytes) -> bytes:
    """What workers and vaults prove to each other: they never see the token itself."""
    return hmac.digest(token, b"everstep links", "sha256")


def prove(token: bytes, side: Side, hello: Hello, challenge: Challenge) -> bytes:
    """This side's proof for one connection: covers both nonces, the job, and who the client says it is."""
    return proof.prove(token, side.value, _parts(hello, challenge))


def proves(mac: bytes, token: bytes, side: Side, hello: Hello, challenge: Challenge) -> bool:
    return proof.proves(mac, token, side.value, _parts(hello, challenge))


def _parts(hello: Hello, challenge: Challenge) -> list[bytes]:
    claims = (hello.role, hello.node, hello.incarnation, hello.job, challenge.job)
    return [hello.nonce, challenge.nonce, *(claim.encode() for claim in claims)]
