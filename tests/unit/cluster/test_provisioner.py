from pathlib import Path

from tools.cluster.provisioner import CLASS, released, unserved, volume_for


def claim(**changes):
    spec = {
        "storageClassName": CLASS,
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
    } | changes.pop("spec", {})
    return {"metadata": {"name": "data", "namespace": "team", "uid": "u-1"} | changes, "spec": spec}


def test_claims_of_our_class_without_a_volume_are_served():
    waiting = claim()
    others = [
        claim(spec={"storageClassName": "fast"}),
        claim(spec={"volumeName": "pv"}),
        claim(deletionTimestamp="2026-01-01T00:00:00Z"),
    ]
    assert unserved({"items": [*others, waiting]}) == [waiting]


def test_a_volume_is_reserved_for_its_claim_in_a_folder_of_its_own():
    spec = volume_for(claim(), Path("/volumes"))["spec"]
    assert spec["hostPath"]["path"] == "/volumes/pvc-u-1"
    assert spec["accessModes"] == ["ReadWriteMany"]
    assert (spec["claimRef"]["namespace"], spec["claimRef"]["name"], spec["claimRef"]["uid"]) == ("team", "data", "u-1")


def test_only_our_released_volumes_are_removed():
    def volume(name: str, storage_class: str, phase: str):
        return {"metadata": {"name": name}, "spec": {"storageClassName": storage_class}, "status": {"phase": phase}}

    volumes = [volume("a", CLASS, "Released"), volume("b", CLASS, "Bound"), volume("c", "fast", "Released")]
    assert released({"items": volumes}) == ["a"]
