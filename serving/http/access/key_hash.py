"""New keys and their hashes.

A key is `ID.SECRET` with 32 random bytes as its secret; the file holds SHA-256 over a salt and the
key. A slow hash such as scrypt guards secrets that can be guessed; nobody guesses 256 random bits,
and a slow one would let each wrong key cost tens of milliseconds. So no hash is made of a key that
somebody thought up.
"""

import hashlib
import re
import secrets

KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
HASH = re.compile(r"sha256:([0-9a-f]{32}):([0-9a-f]{64})")


def new_key(key_id: str) -> tuple[str, str]:
    """Return a new key and its hash; ValueError for an id that is not plain."""
    if not KEY_ID.fullmatch(key_id):
        raise ValueError(f"The id {key_id[:80]!r} is not 1 to 64 letters, digits, '_' or '-'.")
    key = f"{key_id}.{secrets.token_urlsafe(32)}"
    salt = secrets.token_bytes(16)
    return key, f"sha256:{salt.hex()}:{_digest(salt, key).hex()}"


def id_of(key: str) -> str:
    """Return the id that a key claims to be of, or ""."""
    return key.partition(".")[0] if "." in key else ""


def is_key_of(hashed: str, key: str) -> bool:
    """Return whether the hash is the key's; the time taken does not tell how near it was."""
    parts = HASH.fullmatch(hashed)
    if parts is None:
        return False
    return secrets.compare_digest(_digest(bytes.fromhex(parts[1]), key), bytes.fromhex(parts[2]))


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + key.encode("utf-8", "surrogateescape")).digest()
