"""The proof that somebody holds a secret without ever sending it: an HMAC over what both sides of a connection said.

The label is the side which proves, so that its proof cannot be sent back to it as the other's. Among the parts must be
a fresh nonce of each side.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable

NONCE_BYTES = 32


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def prove(token: bytes, label: bytes, parts: Iterable[bytes]) -> bytes:
    mac = hmac.new(token, digestmod="sha256")
    for part in (label, *parts):
        mac.update(len(part).to_bytes(4, "big") + part)  # with lengths, so that parts cannot be cut differently
    return mac.digest()


def proves(mac: bytes, token: bytes, label: bytes, parts: Iterable[bytes]) -> bool:
    """Whether `mac` is that side's proof. Takes the same time wherever they differ."""
    return hmac.compare_digest(mac, prove(token, label, parts))
