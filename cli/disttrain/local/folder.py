"""The folder of one run: everything it leaves behind, and all that `--resume` needs.

disttrain-runs/
  claims/<claimName>/      storage of all jobs that name the claim
  <job>-<uid5>/
    status.yaml            the job, as `kubectl get -o yaml` would show it
    config/                what the job's Secret holds, and the ports of its agents
    storage/               checkpoints, where the job has storage of its own
    logs/<pod>.log
    metrics/               metrics.jsonl, plots, event files, traces
    pods/<pod>/            scratch space; gone with the pod
"""

import contextlib
import fcntl
import json
import os
import random
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from disttrain.errors import USAGE, CommandError
from disttrain_api import yaml_bounds
from disttrain_api.names import CONFIG_FILE, GENERATED_LENGTH, TOKEN_FILE
from disttrain_api.spec import DistTrainingJob, Storage
from disttrain_api.yaml_bounds import YamlError
from disttrain_operator.plan.identity import child_name

DEFAULT_RUNS = "disttrain-runs"
STATUS_FILE = "status.yaml"
METRICS_FILE = "metrics.jsonl"
AGENTS_FILE = "agents.json"
"""Ports of the workers' agents in the last attempt, by the worker's number."""
_OF_NAMES = "bcdfghjklmnpqrstvwxz2456789"
"""What the API server makes names of: no letter that makes a word or looks like a digit."""

RawJob = dict[str, Any]


class RunFolder:
    """Paths of one run, and its files."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def config(self) -> Path:
        return self.path / "config"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def status_file(self) -> Path:
        return self.path / STATUS_FILE

    def log(self, pod: str) -> Path:
        return self.logs / f"{pod}.log"

    def scratch(self, pod: str) -> Path:
        return self.path / "pods" / pod

    def termination_log(self, pod: str) -> Path:
        return self.scratch(pod) / "termination-log"

    def storage(self, storage: Storage | None) -> Path:
        """The folder that a job's pods find in DISTTRAIN_STORAGE."""
        if storage is not None and storage.claim_name is not None:
            return self.path.parent / "claims" / storage.claim_name
        return self.path / "storage"

    def write_job(self, job: RawJob) -> None:
        """Raises OSError, and then leaves the former file."""
        part = self.path / f".{STATUS_FILE}.part"
        try:
            part.write_text(to_yaml(job))
            part.replace(self.status_file)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def read_job(self) -> RawJob:
        file = self.status_file
        try:
            job = yaml_bounds.load(file.read_text())
            DistTrainingJob.model_validate(job, by_alias=True, by_name=False)
        except OSError as error:
            sentence = f"{self.path} is not the folder of a run: cannot read {STATUS_FILE} ({error.strerror})"
            raise CommandError(sentence, USAGE) from error
        except (YamlError, ValueError) as error:
            raise CommandError(f"{file} is damaged: {str(error).splitlines()[0]}", USAGE) from error
        return dict(job)

    def write_support(self, secret: Mapping[str, str], storage: Storage | None, agents: Sequence[int] = ()) -> None:
        """Write what a cluster keeps in the job's Secret and claim. Raises OSError.

        agents: ports of the workers' agents in this attempt.
        """
        self.config.mkdir(exist_ok=True)
        if agents:
            (self.config / AGENTS_FILE).write_text(json.dumps(agents))
        if CONFIG_FILE in secret:
            _write_if_other(self.config / CONFIG_FILE, secret[CONFIG_FILE])
        if TOKEN_FILE in secret:
            _write_private(self.config / TOKEN_FILE, secret[TOKEN_FILE])
        if storage is not None and storage.url is None:
            self.storage(storage).mkdir(parents=True, exist_ok=True)

    def forget_pod(self, pod: str) -> None:
        """Its scratch space dies with it; its log stays."""
        shutil.rmtree(self.scratch(pod), ignore_errors=True)

    def forget_pods(self) -> None:
        shutil.rmtree(self.path / "pods", ignore_errors=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One runner at a time. The lock is the kernel's: it does not outlive the process."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise CommandError(f"{self.path} is in use: another disttrain run works on this job", USAGE) from error
        finally:
            os.close(descriptor)


def new_run(runs: Path, manifest: DistTrainingJob) -> tuple[RunFolder, RawJob]:
    """A folder, and the job in it as an API server would have stored it. Raises CommandError."""
    metadata = manifest.metadata
    claim = manifest.spec.storage.claim_name if manifest.spec.storage else None
    if claim is not None and (claim.startswith(".") or Path(claim).name != claim):
        raise CommandError(f"storage.claimName '{claim}' is not the name of a claim", USAGE)
    uid = str(uuid.uuid4())
    name = metadata.name
    if metadata.generate_name is not None:
        name = metadata.generate_name + "".join(random.choices(_OF_NAMES, k=GENERATED_LENGTH))
    folder = RunFolder(runs / child_name(name, uid))
    job: RawJob = {
        "apiVersion": manifest.api_version,
        "kind": manifest.kind,
        "metadata": {
            **metadata.model_dump(mode="json", by_alias=True, exclude_defaults=True),
            "name": name,
            "namespace": metadata.namespace or "default",
            "uid": uid,
            "generation": 1,
            "creationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        },
        "spec": manifest.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    try:
        folder.path.mkdir(parents=True)
        folder.logs.mkdir()
        folder.write_job(job)
    except OSError as error:
        raise CommandError(
            f"cannot write to {folder.path.parent}: {error.strerror}; choose another place with --runs FOLDER"
        ) from error
    return folder, job


def _write_if_other(file: Path, text: str) -> None:
    """A file that has the text already, that of an earlier attempt, needs no room on a full disk."""
    if not (file.exists() and file.read_text() == text):
        file.write_text(text)


def _write_private(file: Path, text: str) -> None:
    """Write a file that only its owner can ever open, whatever the umask. It is complete, or the previous one stays."""
    if file.is_file() and not file.is_symlink() and file.read_text() == text:
        file.chmod(0o600)
        return
    part = file.with_name(f".{file.name}.part")
    part.unlink(missing_ok=True)
    try:
        # Not write_text: whoever opened the file before a chmod could read on after it.
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(text)
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def to_yaml(value: object, *, ascii_only: bool = False) -> str:
    """Return the YAML as kubectl prints it: block style, in the order given."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=not ascii_only, width=120)
