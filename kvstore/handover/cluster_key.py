"""The cluster key: what all stores of a cluster share, and the TLS that follows from it.

A private key follows from the secret, and one certificate from that: all stores present the same
one, and trust no other. So both ends of a connection prove that they have the secret.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import secrets
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_KEY_BYTES = 32
_NAME = "kvstore"
# Of the certificate, in UTC: a node whose clock is wrong is a peer all the same.
_FROM, _UNTIL = dt.datetime(1970, 1, 1), dt.datetime(9999, 12, 31)  # noqa: DTZ001


class ClusterKey:
    """What all stores of a cluster share."""

    def __init__(self, secret: bytes) -> None:
        """secret: 32 bytes."""
        self._secret = secret

    @staticmethod
    def make(path: Path) -> None:
        """Make a file with a new key. Raises ConfigError, and keeps a file that is there."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            hint = "expected a new file in a folder that is there"
            raise ConfigError(f"cluster key {path}: {exc.strerror}; {hint}") from exc
        try:
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_hex(_KEY_BYTES) + "\n")
        except OSError as exc:
            path.unlink()
            raise ConfigError(f"cluster key {path}: {exc.strerror}") from exc

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """Read a key file. Raises ConfigError if it is not one, or others may read it."""
        try:
            mode, text = path.stat().st_mode, path.read_text(encoding="ascii").strip()
            secret = bytes.fromhex(text)
        except OSError as exc:
            raise ConfigError(
                f"cluster key {path}: {exc.strerror}; kvstore keygen makes one"
            ) from exc
        except ValueError as exc:
            raise ConfigError(f"cluster key {path}: expected 64 hexadecimal digits") from exc
        if len(secret) != _KEY_BYTES:
            raise ConfigError(f"cluster key {path}: {len(text)} digits, expected 64")
        if mode & 0o077:
            raise ConfigError(f"cluster key {path}: mode {mode & 0o777:o}, expected 600")
        return cls(secret)

    def derived(self, purpose: str) -> bytes:
        """Return a key of 32 bytes for another purpose; it does not tell this one."""
        person = f"kvstore-{purpose}".encode()
        return hashlib.blake2b(self._secret, digest_size=32, person=person).digest()

    def tls(self, *, accepts: bool) -> ssl.SSLContext:
        """Return the settings of connections that are accepted, or made. Raises ConfigError."""
        try:
            return self._context(accepts=accepts)
        except (ImportError, OSError, ValueError) as exc:
            raise ConfigError(f"TLS of the side channel cannot be used here: {exc}") from exc

    def _context(self, *, accepts: bool) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.check_hostname = False  # the certificate names no host
        made.verify_mode = ssl.CERT_REQUIRED
        made.set_ecdh_curve("prime256v1")  # the dearest of the others takes 100 ms of a turn
        if accepts:
            made.num_tickets = 0  # each connection proves the key anew
        private, certificate = self._pem()
        made.load_verify_locations(cadata=certificate.decode())
        with os.fdopen(os.memfd_create("kvstore-key", os.MFD_CLOEXEC), "wb") as file:
            file.write(private + certificate)  # it has to be a file, and is in no file system
            file.flush()
            made.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return made

    def _pem(self) -> tuple[bytes, bytes]:
        """Return the private key and the certificate, the same ones each time."""
        from cryptography import x509  # noqa: PLC0415 - most stores have no key
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

        private: Ed25519PrivateKey = ed25519.Ed25519PrivateKey.from_private_bytes(
            self.derived("tls")
        )
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
        made = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(1)
        made = made.public_key(private.public_key()).not_valid_before(_FROM).not_valid_after(_UNTIL)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        text = serialization.Encoding.PEM
        form, unlocked = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return private.private_bytes(text, form, unlocked), made.sign(private, None).public_bytes(
            text
        )
