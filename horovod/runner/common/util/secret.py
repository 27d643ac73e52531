"""Create a key with which workers authenticate each other.

Jobs have their own secrets. This key is for settings that require one.
"""

from __future__ import annotations

import base64
import secrets

SECRET_LENGTH = 32  # length in bytes
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"  # name of the environment variable


def make_secret_key() -> bytes:
    return base64.b64encode(secrets.token_bytes(SECRET_LENGTH))


__all__ = ["HOROVOD_SECRET_KEY", "SECRET_LENGTH", "make_secret_key"]
