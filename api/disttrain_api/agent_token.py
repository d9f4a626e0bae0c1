"""The token that agents are asked with. It follows from the job's and tells nothing of it: it is sent in the clear."""

import hashlib
import hmac


def agent_token(job_token: str) -> str:
    """Return what the header of a request to an agent holds: HMAC-SHA256 of the word "agent" under the job's token."""
    return hmac.new(job_token.encode(), b"agent", hashlib.sha256).hexdigest()
