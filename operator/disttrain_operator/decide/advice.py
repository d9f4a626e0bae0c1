"""The sentences on what keeps a gang from running -> what is the matter, and what to do."""

from disttrain_operator.decide import pulls, refusals, volumes, waiting

_KNOWN = (*waiting.ADVICE.values(), *refusals.EVERY_ADVICE, *pulls.EVERY_ADVICE, *volumes.EVERY_ADVICE)


def split(sentence: str) -> tuple[str, list[str]]:
    """Return the sentence without the advice at its end, and the advice.

    That of an operator of another version may be unknown, and stays.
    """
    found: list[str] = []
    rest = sentence.rstrip().rstrip(".")
    while (advice := next((one for one in _KNOWN if rest.endswith(f"; {one}")), None)) is not None:
        rest = rest.removesuffix(f"; {advice}")
        found.insert(0, advice)
    return (rest, found) if found else (sentence, found)
