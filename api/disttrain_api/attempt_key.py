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
    """Return the proof that an address of worker 0 comes from somebody with the job's token: HMAC-SHA256 of it, as
    hexadecimal digits. Others may read it, because it is valid for this address in this attempt alone.

    Raises ValueError for an empty token.
    """
    return hmac.digest(attempt_key(token, "address", uid, attempt), address.encode(), "sha256").hex()
