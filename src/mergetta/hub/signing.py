"""Ed25519 signatures of bundles, so that a device can trust a bundle whatever it came through."""

from __future__ import annotations

import base64
import os
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mergetta.errors import MergettaError
from mergetta.files import read_bytes


class Signer:
    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.public_key = base64.b64encode(raw).decode()
        """What devices verify with: 32 bytes, base64."""

    @classmethod
    def load(cls, path: str | Path) -> Signer:
        try:
            key = serialization.load_pem_private_key(read_bytes(path), None)
        except (ValueError, TypeError) as error:
            raise MergettaError(f"{path} is not an unencrypted private key in PEM: {error}.") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise MergettaError(f"{path} is not an Ed25519 key: make one with `mergetta hub key`.")
        return cls(key)

    @classmethod
    def create(cls, path: str | Path) -> Signer:
        """Write a new private key, readable by its owner only."""
        path = Path(path)
        key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(pem)
        except OSError as error:
            raise MergettaError(f"Cannot write {path}: {error.strerror or error}.") from error
        return cls(key)

    def sign(self, data: bytes) -> str:
        return base64.b64encode(self._key.sign(data)).decode()
