"""Optional encryption of control connections: one certificate, given to every host, is both identity and root.

The token already proves who may talk; TLS keeps others from listening. Names in the certificate are not compared,
because nodes reach the controller by whatever address their network gives it: holding its key is what counts.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from everstep.core.config import RunConfig
from everstep.core.errors import UsageError


def server_context(config: RunConfig) -> ssl.SSLContext | None:
    """For the controller; None without `control.tls_cert`. Raises UsageError for files that do not serve."""
    control = config.control
    if not control.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(control.tls_cert, control.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(f"control.tls_cert {control.tls_cert}, control.tls_key {control.tls_key}: {error}") from error
    return context


def client_context(certificate: str) -> ssl.SSLContext | None:
    """For whoever connects; None when `certificate` is empty. Raises UsageError when it cannot be read."""
    if not certificate:
        return None
    if not Path(certificate).exists():
        raise UsageError(f"control.tls_cert {certificate}: no such file")
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    return context
