"""Certificates that openssl makes; a test that needs one is skipped where it is not installed."""

import shutil
import subprocess
from pathlib import Path

import pytest


def run_openssl(*words: str) -> None:
    """Run openssl with these words; skip the test where it is not installed."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("certificates are made by openssl")
    subprocess.run([openssl, *words], check=True, capture_output=True)


def make_certificate(certificate: Path, key: Path) -> None:
    """Write a certificate of 127.0.0.1 that its own key has signed, and that key."""
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    run_openssl("req", "-x509", *kind, *names, "-keyout", str(key), "-out", str(certificate))
