"""The steps of examples/llama on a cluster, as its page says: tokenizer and corpus come from here."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.documented import LLAMA, console_commands
from tests.e2e.conftest import TRAINER_IMAGE
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import ONE_THREAD
from tools.cluster.paths import REPOSITORY

CLAIM = "llama"
LOCAL = Path("disttrain-runs", "claims", CLAIM)
MOUNTED = "/checkpoints"
FILES = "files"
"""The pod with which a user copies to the claim, and in which the exports run."""


class Steps:
    """A user's folder here, and the claim there."""

    def __init__(self, kubectl: Kubectl, folder: Path) -> None:
        self._kubectl, self.folder = kubectl, folder
        self._commands = console_commands(LLAMA)

    def here(self, of: str) -> str:
        """What the page's first command with that text prints; the page's variables are set."""
        command = next(command for command in self._commands if of in command)
        variables = [command for command in self._commands if re.match(r"\w+=", command)]
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", "\n".join([*variables, command])],
            check=False,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def there(self, *command: str) -> str:
        return self._kubectl("exec", FILES, "--", *command, timeout=300)

    def put(self, *paths: Path) -> None:
        for path in paths:
            self._kubectl("cp", str(self.folder / path), f"{FILES}:{MOUNTED}/{path.name}")

    def get(self, name: str) -> None:
        self._kubectl("cp", f"{FILES}:{MOUNTED}/{name}", str(self.folder / LOCAL / name))

    def run(self, name: str) -> dict[str, Any]:
        """Apply a manifest of the page's with the claim's paths, and wait until it has trained; its last figures."""
        text = (self.folder / "examples" / "llama" / f"{name}.yaml").read_text()
        changed = re.sub(rf"{LOCAL}|examples/llama(?=/conv)", MOUNTED, text)
        manifest = yaml.safe_load(changed)
        manifest["spec"]["workers"]["template"] = ONE_THREAD
        self._kubectl.apply(manifest)
        job = manifest["metadata"]["name"]
        self._kubectl.wait("Finished", job)
        assert self._kubectl.condition(job, "Complete")["status"] == "True", self._kubectl.describe_job(job)
        return {figure["name"]: figure["value"] for figure in self._kubectl.status(job)["progress"]["metrics"]}


def a_pod_with_the_claim() -> dict[str, Any]:
    container = {
        "name": "files",
        "image": TRAINER_IMAGE,
        "command": ["sleep", "3600"],
        "volumeMounts": [{"name": CLAIM, "mountPath": MOUNTED}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": FILES}, "spec": spec}


@pytest.fixture
def steps(kubectl: Kubectl, tmp_path: Path) -> Steps:
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    claim = {"storageClassName": "disttrain-shared", "accessModes": ["ReadWriteMany"]}
    claim |= {"resources": {"requests": {"storage": "1Gi"}}}
    kubectl.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": claim})
    kubectl.apply(a_pod_with_the_claim())
    kubectl("wait", "pod", FILES, "--for=condition=Ready", "--timeout=300s", timeout=330)
    return Steps(kubectl, tmp_path)


def test_a_llama_is_pretrained_exported_and_fine_tuned_on_a_cluster(steps: Steps) -> None:
    steps.here("tokenizer.py")
    steps.here("data prepare")
    llama = Path("examples", "llama")
    steps.put(LOCAL / "tokenizer", LOCAL / "corpus", llama / "conversations.jsonl")
    steps.put(llama / "pretrain.yaml", llama / "finetune.yaml")

    figures = steps.run("pretrain")
    assert figures["loss"] < 4.5, "6.24 is that of a model that knows nothing"
    export = ("disttrain", "export")
    tokenizer = ("--tokenizer", f"{MOUNTED}/tokenizer")
    manifest = f"{MOUNTED}/pretrain.yaml"
    steps.there(*export, f"{MOUNTED}/pretrained", f"{MOUNTED}/model", "--model", manifest, *tokenizer)
    steps.get("model")
    assert steps.here("generate.py").startswith("def read(")

    figures = steps.run("finetune")
    assert figures["loss"] < 2.0
    manifest = f"{MOUNTED}/finetune.yaml"
    steps.there(*export, f"{MOUNTED}/finetuned", f"{MOUNTED}/adapter", "--model", manifest, "--adapter")
    steps.get("adapter")
    without, _, adapted = steps.here("--adapter $llama/adapter").partition("with the adapter:\n")
    assert adapted.strip() not in without
