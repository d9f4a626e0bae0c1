"""Keys that are made of a job's token: one for each purpose and attempt, so that none serves for another."""

import hmac


def attempt_key(token: str, purpose: str, uid: str, attempt: int, generation: int = 0) -> bytes:
    """Return the key of one attempt of the job `uid`, and of one generation of its ranks, which is how often they have
    started before. Raises ValueError for an empty token, which anybody knows."""
    if not token.strip():
        raise ValueError("the job's token is empty")
    lives = f"{attempt} {generation}" if generation else str(attempt)
    return hmac.digest(token.encode(), f"disttrain {purpose} {uid} {lives}".encode(), "sha256")
