"""A rank that the kernel kills for lack of memory, through `disttrain run`, whose agent lives on."""

from tests.small_memory import small_memory

from .conftest import DISTTRAIN, Workplace
from .test_hangs import goes_on, loses_no_step, start

LIMIT = 3 * 2**30


def test_it_starts_again_in_its_pod_from_the_memory_of_the_other_one(workplace: Workplace) -> None:
    with small_memory(LIMIT) as before:
        run = start(workplace, "InPlace", command=[*before, *DISTTRAIN])
        (workplace.folder / "memory").touch()
        run.until(lambda: "restart 1 in place: rank 1 ran out of memory" in run.log(0, attempt=1), "they start again")
        (attempt,) = goes_on(workplace, run)["attempts"]
    assert attempt["restartsInPlace"] == 1
    assert attempt["lastRestartInPlace"].startswith("rank 1 (pod digits-")
    assert attempt["lastRestartInPlace"].endswith("ran out of memory and was killed")
    assert loses_no_step(run.log(0, attempt=1), survivor=0)
