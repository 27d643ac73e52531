"""Creation of keys with which workers authenticate each other.

Jobs do not use these keys, because every job has its own secret. The keys are only for settings that require one.
"""

from __future__ import annotations

import base64
import secrets

SECRET_LENGTH = 32  # length of a key, in bytes
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"  # name of the environment variable for a key


def make_secret_key() -> bytes:
    return base64.b64encode(secrets.token_bytes(SECRET_LENGTH))


__all__ = ["HOROVOD_SECRET_KEY", "SECRET_LENGTH", "make_secret_key"]
