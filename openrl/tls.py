"""HTTPS: what the server shows to its clients."""

from __future__ import annotations

import ssl
from pathlib import Path

from openrl.config import Config
from openrl.errors import UserError


def server_context(config: Config) -> ssl.SSLContext | None:
    """TLS 1.2 or later; None for plain HTTP. Raises `UserError` for files that do not go together
    or cannot be read."""
    cert, key = config.tls_cert, config.tls_key
    if cert is None:
        if key is not None:
            raise UserError("server.tls_key needs server.tls_cert: the certificate, in PEM")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for file in (cert, key):
        _check_readable(file)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise UserError(
            f"server.tls_cert {cert} and its key {key or 'in the same file'} do not work together: "
            f"{error}"
        ) from error
    return context


def _check_readable(file: Path | None) -> None:
    try:
        if file is not None:
            file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; see server.tls_cert and tls_key") from error


def _no_password() -> str:
    """Else OpenSSL would ask for one on the terminal, and a server would wait there."""
    raise ValueError("the key is behind a password: take that off")
