"""Keys that are made of a job's token: one for each purpose and attempt, so that none serves for another."""

import hmac

MAX_PROOF_LETTERS = 64


def attempt_key(token: str, purpose: str, uid: str, attempt: int, generation: int = 0) -> bytes:
    """Return the key of one attempt of the job `uid`, and of one generation of its ranks, which is how often they have
    started before. Raises ValueError for an empty token, which anybody knows."""
    if not token.strip():
        raise ValueError("the job's token is empty")
    lives = f"{attempt} {generation}" if generation else str(attempt)
    return hmac.digest(token.encode(), f"disttrain {purpose} {uid} {lives}".encode(), "sha256")


def address_proof(token: str, uid: str, attempt: int, address: str) -> str:
    """Return what shows that whoever says the address of worker 0 knows the job's token: HMAC-SHA256 of the address as
    hexadecimal digits. It may be read by others: it serves for this address of this attempt alone. Raises ValueError
    for an empty token."""
    return hmac.digest(attempt_key(token, "address", uid, attempt), address.encode(), "sha256").hex()
