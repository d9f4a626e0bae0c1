"""What a person sees is written where it can be, and nobody waits for it."""

import os
import re
import threading
from pathlib import Path

import pytest

import disttrain
from disttrain.main import main
from disttrain.output import Outlet

PACKAGE = Path(next(iter(disttrain.__path__)))
# Its streams are those of a pod.
NO_PERSON = {"output.py", "fork_server.py", "in_cluster.py"}


def a_pipe() -> tuple[int, Outlet]:
    reader, writer = os.pipe()
    return reader, Outlet(writer, "ascii")


def test_texts_come_in_order_and_none_is_raised_over() -> None:
    reader, outlet = a_pipe()
    for number in range(500):
        outlet.write(f"line {number} · \n")
    outlet.drain()
    os.close(outlet.fileno())
    with os.fdopen(reader) as file:
        assert file.read() == "".join(f"line {number} \\xb7 \n" for number in range(500))


def test_a_reader_that_is_gone_costs_nothing() -> None:
    reader, outlet = a_pipe()
    os.close(reader)
    for _ in range(3):
        outlet.write("to nobody\n")
        outlet.drain()
    os.close(outlet.fileno())


def test_a_reader_that_pauses_gets_the_newest_and_holds_nobody_up() -> None:
    reader, outlet = a_pipe()
    # No pipe holds as much.
    for number in range(5000):
        outlet.write(f"{number:4} {'x' * 995}")
    received = b""
    while not received.endswith(b"4999 " + b"x" * 995):
        received += os.read(reader, 1 << 20)
    numbers = [int(found) for found in re.findall(rb"([ \d]{4}) x", received)]
    assert numbers == sorted(numbers)
    assert len(numbers) < 5000
    assert numbers[-1000:] == list(range(4000, 5000))
    os.close(reader)
    os.close(outlet.fileno())


def test_a_result_that_cannot_be_written_is_an_error_with_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    kept = os.dup(1)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        os.dup2(full, 1)
        code = main(["version"])
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(full)
    assert code == 1
    assert capfd.readouterr().err == "disttrain: cannot write to standard output: No space left on device\n"


def test_everything_that_a_person_sees_goes_through_one_module() -> None:
    modules = list(PACKAGE.rglob("*.py"))
    assert PACKAGE / "output.py" in modules
    for path in modules:
        if path.name not in NO_PERSON:
            assert not re.search(r"(?<!\.)\bprint\(|sys\.std(out|err)", path.read_text()), path


def test_texts_of_several_threads_have_one_writer() -> None:
    for _ in range(50):
        reader, outlet = a_pipe()
        before = threading.active_count()
        begin = threading.Barrier(8)

        def write(outlet: Outlet = outlet, begin: threading.Barrier = begin) -> None:
            begin.wait()
            outlet.write("x")

        writers = [threading.Thread(target=write) for _ in range(8)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert threading.active_count() == before + 1
        outlet.drain()
        os.close(outlet.fileno())
        os.close(reader)
