"""The dashboard of a cluster as a process, against an API server that believes everything."""

import re
import signal
import socket
import subprocess
import sys
import threading
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from disttrain.dashboard.in_cluster import BOUNDS, CONNECTIONS, MAX_FIELD, main
from disttrain.dashboard.past import MAX_PAST
from disttrain_dashboard.app import _MAX_KEPT_BYTES
from disttrain_dashboard.viewers import MAX_NAMESPACES, Limits
from disttrain_dashboard.views.listing import MAX_JOBS
from tests.unit.cli.fake_api import JOBS, FakeApi
from tests.unit.dashboard.test_cluster import put
from tools.cluster.paths import REPOSITORY

TOKEN = "a-very-secret.token_of-a-person"
OURS = {"disttrain", "disttrain_api", "disttrain_dashboard", "disttrain_operator"}


class Served:
    """The process, its port, and what it has written."""

    def __init__(self, api: FakeApi, folder: Path) -> None:
        (folder / "ca.crt").write_text("")
        command = [sys.executable, "-m", "disttrain.dashboard.in_cluster", "--address=127.0.0.1", "--port=0"]
        command += [f"--server={api.url}", f"--ca-file={folder / 'ca.crt'}"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.log = self.process.stderr.readline()
        match = re.search(r"serving at port (\d+), with the API server ", self.log)
        assert match is not None, self.log
        self.port = int(match[1])
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def get(self, path: str, token: str = TOKEN) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def send(self, *parts: bytes) -> bytes:
        """Return what comes back on one connection, until it is closed."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            try:
                for part in parts:
                    connection.sendall(part)
                return b"".join(iter(lambda: connection.recv(65536), b""))
            except (ConnectionResetError, BrokenPipeError):
                return b""

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join(60)
        return code


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as fake:
        yield fake


@pytest.fixture
def served(api: FakeApi, tmp_path: Path) -> Iterator[Served]:
    found = Served(api, tmp_path)
    yield found
    found.process.kill()
    found.process.wait(60)


def test_the_api_server_is_asked_with_the_token_of_the_viewer_alone(api, served) -> None:
    put(api)
    assert served.get("/api/jobs", "ann") == 200
    assert served.get("/api/job?key=default/digits", "bob") == 200
    assert api.asked[0].startswith("GET /apis/disttrain.io/v1alpha1/disttrainingjobs?")
    assert api.asked[1].startswith("GET /api/v1/configmaps?")
    assert api.credentials[:2] == ["Bearer ann"] * 2
    assert set(api.credentials[2:]) == {"Bearer bob"}
    assert {asked.split()[0] for asked in api.asked} == {"GET"}
    assert served.get("/healthz") == 200


def test_no_token_is_in_the_log(api, served) -> None:
    """Red where the HTTP server logs requests, or those that it cannot read."""
    put(api)
    head = f"Authorization: Bearer {TOKEN}".encode()
    assert served.get("/api/jobs") == 200
    for answer in ((401, {"message": "no"}), (403, {"message": "no"}), (200, b"no JSON"), (500, b"")):
        api.answers[f"{JOBS.format('default')}/digits"] = answer
        assert served.get("/api/job?key=default/digits") in (401, 403, 503)
    # A job that no page can be made of.
    api.answers[f"{JOBS.format('default')}/digits"] = (200, {"metadata": {}})
    assert served.get("/api/job?key=default/digits") == 500
    for broken in (head + b"\0", head + b"\r\n" + b"x" * 10, head * 400, b"GET\r\n" + head, head.replace(b":", b"")):
        served.send(b"GET /api/jobs HTTP/1.1\r\nHost: x\r\n" + broken + b"\r\n\r\n")
    assert served.end() == 0
    assert "Traceback" in served.log, "the mistake is there"
    assert TOKEN not in served.log


def test_a_connection_has_bounds(served) -> None:
    get = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    assert served.send(get + b"\r\n").startswith(b"HTTP/1.1 200")
    assert served.send(get + b"\r\n" + get + b"\r\n").count(b"HTTP/1.1") == 1
    long = b"X: " + b"x" * (MAX_FIELD - 100) + b"\r\n"
    assert served.send(get + long + b"\r\n").startswith(b"HTTP/1.1 200")
    assert b" 200 " not in served.send(get + long + long * 2 + long + b"\r\n")
    assert b" 200 " not in served.send(get + b"X: " + b"x" * (MAX_FIELD + 100) + b"\r\n\r\n")
    body = f"Content-Length: {2 * CONNECTIONS.bytes}\r\n\r\n".encode() + b"x" * 2 * CONNECTIONS.bytes
    served.send(get + body)
    assert served.get("/healthz") == 200


def test_half_requests_keep_nobody_out(served) -> None:
    silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(CONNECTIONS.connections + 50)]
    for connection in silent:
        connection.send(b"GET /")
    assert served.get("/healthz") == 200
    for connection in silent:
        connection.close()


def test_it_starts_with_what_the_operators_image_has() -> None:
    """Red where it needs a package of the command line, or of the trainer."""
    code = "import sys; import disttrain.dashboard.in_cluster; print(*{m.partition('.')[0] for m in sys.modules})"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    needed = (REPOSITORY / "operator" / "requirements.txt").read_text().splitlines()
    known = {line.partition("==")[0].replace("-", "_") for line in needed if "==" in line}
    known |= {"attr", "cython_runtime", "re2", "sitecustomize", "yaml"} | OURS | set(sys.stdlib_module_names)
    foreign = {name for name in loaded - known if not name.startswith("_")}
    assert foreign == set()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert "urllib3" in " ".join(project["dependencies"])


def test_without_an_api_server_it_says_what_is_missing(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main([f"--ca-file={tmp_path / 'ca.crt'}"])
    assert "name the API server with --server" in capsys.readouterr().err
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.delenv("KUBERNETES_SERVICE_PORT", raising=False)
    for content in (None, "no certificate"):
        if content is not None:
            (tmp_path / "ca.crt").write_text(content)
        assert main([f"--ca-file={tmp_path / 'ca.crt'}"]) == 1
        assert str(tmp_path / "ca.crt") in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        f"{CONNECTIONS.connections} connections, each for one request",
        f"of each token {Limits().per_second:g} requests a second and",
        f"{MAX_JOBS:,} jobs and {BOUNDS.list // 2**20} MiB",
        f"answers that are kept by {_MAX_KEPT_BYTES // 2**20} MiB",
        f"at most {MAX_NAMESPACES}, in the field",
        f"the last {MAX_PAST} of the",
    ],
)
def test_a_number_of_the_page_is_the_codes(words: str) -> None:
    assert words in " ".join((REPOSITORY / "docs" / "dashboard.md").read_text().split())
