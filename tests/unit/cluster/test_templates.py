import json
import tomllib
from pathlib import Path

import yaml

from tools.cluster.nodes import NODES, Node
from tools.cluster.paths import TEMPLATES


def written(monkeypatch, folder: Path) -> Node:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.setattr("tools.cluster.nodes.cni_plugins", lambda: Path("/usr/lib/cni"))
    NODES[1].write_configs(Path("/ca.crt"))
    return NODES[1]


def test_containerd_keeps_everything_below_its_node(monkeypatch, tmp_path: Path):
    node = written(monkeypatch, tmp_path)
    config = tomllib.loads((node.folder / "containerd.toml").read_text())
    folders = [config["root"], config["state"], config["grpc"]["address"]]
    assert all(Path(folder).is_relative_to(tmp_path) for folder in folders)
    assert config["plugins"]["io.containerd.grpc.v1.cri"]["cni"]["conf_dir"] == str(node.folder / "cni")


def test_the_kubelet_uses_the_containerd_of_its_node(monkeypatch, tmp_path: Path):
    node = written(monkeypatch, tmp_path)
    config = yaml.safe_load((node.folder / "kubelet.yaml").read_text())
    assert config["containerRuntimeEndpoint"] == f"unix://{node.socket}"
    assert config["cgroupRoot"].endswith("/node2")


def test_pods_are_plugged_into_the_bridge_of_their_node(monkeypatch, tmp_path: Path):
    node = written(monkeypatch, tmp_path)
    bridge = json.loads((node.folder / "cni" / "cni.conflist").read_text())["plugins"][0]
    assert bridge["bridge"] == "cni1"
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.244.1.0/24"}]]


def test_nodes_share_no_address_port_or_interface():
    seen = [(node.address, node.link, node.bridge, node.pod_addresses, node.cgroup) for node in NODES]
    assert all(len(set(column)) == len(NODES) for column in zip(*seen, strict=True))


def test_fake_pods_have_every_stage_of_a_life():
    stages = list(yaml.safe_load_all((TEMPLATES / "kwok-stages.yaml").read_text()))
    assert [stage["metadata"]["name"] for stage in stages] == [
        "node-initialize",
        "pod-ready",
        "pod-complete",
        "pod-delete",
    ]
