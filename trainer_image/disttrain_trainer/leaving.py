"""A rank that ends before its work is done: what it, or its agent, says of it. Imports no torch: the agent needs it."""


def left(step: int | None, steps: int, code: int, why: str) -> str:
    """Return the sentence. step: the last one that was done, of `steps`; None or 0 steps: unknown."""
    where = f"at step {step} of {steps}" if steps and step is not None else "before its first step"
    return f"left {where} with exit code {code} before its work was done; {why}"
