"""Certificates that are made for a test."""

import ssl
import subprocess
from pathlib import Path


def self_signed(folder: Path) -> Path:
    """Make a self-signed certificate for localhost; its key is in the same folder."""
    path = folder / "localhost.crt"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(path.with_suffix(".key")), "-out", str(path)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return path


def context_of(certificate: Path) -> ssl.SSLContext:
    """Return the context of a server with a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return context
