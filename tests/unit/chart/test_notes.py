"""What `helm install` prints at its end."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import GENEROUS
from tools.cluster import build
from tools.cluster.paths import REPOSITORY

# From cold, helm is built first, beside all that others build.
pytestmark = pytest.mark.timeout(1800)


def render(chart: Path, *settings: str) -> dict[str, Any]:
    """Return the chart's objects by kind; of several of a kind the last."""
    helm = build.ensure(["helm"])["helm"]
    flags = [flag for setting in ("crds.enabled=false", *settings) for flag in ("--set", setting)]
    command = [helm, "template", "disttrain", str(chart), "-n", "system", "--kube-version", "1.34.0", *flags]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=GENEROUS)
    assert done.returncode == 0, done.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(done.stdout) if document}


@pytest.mark.parametrize(
    "settings", [(), ("image.repository=a.example/operator", "image.tag=x", "trainer.image.repository=b")]
)
def test_they_name_both_images_and_how_a_missing_one_shows(tmp_path: Path, settings: tuple[str, ...]) -> None:
    chart = shutil.copytree(REPOSITORY / "helm" / "disttrain", tmp_path / "chart")
    # `helm template` leaves the notes out: here they are a value of an object.
    (chart / "templates" / "NOTES.txt").rename(chart / "NOTES")
    (chart / "templates" / "notes.yaml").write_text('kind: Notes\ntext: {{ tpl (.Files.Get "NOTES") . | toJson }}\n')
    objects = render(chart, *settings)
    text = objects["Notes"]["text"]
    assert "port-forward" not in text
    shown = render(chart, "dashboard.enabled=true")["Notes"]["text"]
    assert "\n`kubectl port-forward -n system service/disttrain-dashboard 8471:80` leads to the dashboard" in shown
    (operator,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    (trainer,) = [flag for flag in operator["args"] if flag.startswith("--trainer-image=")]
    assert f"- {operator['image']}\n- {trainer.removeprefix('--trainer-image=')}\n" in text
    assert "kubectl get pods -n system" in text
    assert "ErrImagePull or ImagePullBackOff" in text
