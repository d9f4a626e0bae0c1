"""`disttrain dashboard` as a process."""

import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from disttrain.main import main


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """The process, its port and its token."""
    command = [sys.executable, "-m", "disttrain.main", "dashboard", "--port", "0", "--runs", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/#token=([\w-]{43})\n", process.stdout.readline())
        assert match is not None
        yield process, int(match[1]), match[2]
        process.kill()


def test_it_prints_an_address_whose_token_opens_it_and_ends_with_ctrl_c(served) -> None:
    process, port, token = served
    address = f"http://127.0.0.1:{port}/api/jobs"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(address)
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in said


def test_it_listens_on_the_loopback_interface_alone(served) -> None:
    _, port, _ = served
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert [place for place in listening if place.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_a_port_that_is_taken_is_a_sentence(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["dashboard", "--port", str(port), "--runs", str(tmp_path)]) == 1
    assert re.fullmatch(
        rf"disttrain: cannot listen on port {port}: .*; --port 0 takes any that is free\n", capfd.readouterr().err
    )
