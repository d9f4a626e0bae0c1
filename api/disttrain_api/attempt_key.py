"""Keys that are made of a job's token: one for each purpose and attempt, so that none serves for another."""

import hmac


def attempt_key(token: str, purpose: str, uid: str, attempt: int) -> bytes:
    """Return the key of one attempt of the job `uid`. Raises ValueError for an empty token, which anybody knows."""
    if not token.strip():
        raise ValueError("the job's token is empty")
    return hmac.digest(token.encode(), f"disttrain {purpose} {uid} {attempt}".encode(), "sha256")
