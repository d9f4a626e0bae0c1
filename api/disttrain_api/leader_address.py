"""How an agent hears where worker 0's pod is: the request, and the proof that comes with it."""

import hmac

from disttrain_api.attempt_key import attempt_key
from disttrain_api.names import LEADER_PATH

MAX_PROOF_LETTERS = 64


def address_proof(token: str, uid: str, attempt: int, address: str, replacement: int) -> str:
    """Return the proof that an address of worker 0 comes from somebody with the job's token: HMAC-SHA256 of it and of
    which replacement is there (0: the first pod), as hexadecimal digits. Others may read it, because it is valid for
    both in this attempt alone.

    Raises ValueError for an empty token.
    """
    return hmac.digest(attempt_key(token, "address", uid, attempt), f"{address} {replacement}".encode(), "sha256").hex()


def leader_path(address: str, replacement: int, proof: str) -> str:
    """Return what an agent is asked with POST. replacement: which one is there; 0: the first pod."""
    return f"{LEADER_PATH}?address={address}&replacement={replacement}&proof={proof}"
