from tools.cluster.image_builds import IMAGES
from tools.cluster.images import references
from tools.cluster.paths import IMAGE_TAG
from tools.cluster.pip_access import settings


def test_images_may_be_named_by_the_environment(monkeypatch):
    monkeypatch.setenv("DISTTRAIN_TRAINER_IMAGE", "registry.example/trainer:1")
    monkeypatch.delenv("DISTTRAIN_OPERATOR_IMAGE", raising=False)
    assert references() == {"operator": f"disttrain/operator:{IMAGE_TAG}", "trainer": "registry.example/trainer:1"}
    assert set(references()) == set(IMAGES)


def test_a_build_learns_how_to_reach_packages_and_nothing_of_this_machines_folders():
    listed = ":env:.find-links='/opt/wheels'\n:env:.default-timeout='180'\nglobal.cert='/a.pem'\nglobal.index-url='x'\n"
    assert settings(listed) == {"timeout": "180", "cert": "/a.pem", "index-url": "x"}
