"""What a reader of a job learns of an image that cannot be pulled."""

from typing import Any

import pytest

from disttrain_api.spec import JobSpec
from disttrain_operator.decide.observed import Waiting
from disttrain_operator.decide.pulls import why_not_pulled
from tests.builders import a_job, waiting
from tests.unit.decide.world import a_world

IMAGE = "registry.example/me/tune:1"
TUNE = {"workers": {"template": {"spec": {"containers": [{"name": "trainer", "image": IMAGE}]}}}}
RESOLVE = f'ErrImagePull: failed to pull and unpack image "{IMAGE}": failed to resolve reference "{IMAGE}": '


def a_spec(**given: Any) -> JobSpec:
    spec = a_job(**given).spec
    assert spec is not None
    return spec


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (RESOLVE + f"{IMAGE}: not found", "the registry has no such image; check the image's name and tag"),
        ("reading manifest 1 in registry.example/me/tune: manifest unknown", "the registry has no such image; check"),
        (RESOLVE + "pull access denied, repository does not exist or may require authorization", "or denies it"),
        (RESOLVE + "failed to authorize: unexpected status: 401 Unauthorized", "imagePullSecrets"),
        (RESOLVE + "dial tcp: lookup registry.example on 10.0.0.2:53: no such host", "did not reach the registry"),
        (RESOLVE + "tls: failed to verify certificate: x509: certificate signed by unknown authority", "certificate"),
        (f"image pull failed for {IMAGE} because the registry is unavailable: 503", "did not reach the registry"),
        (f"image pull failed for {IMAGE} because the signature validation failed", "its signature was not accepted"),
        (f'failed to pull "{IMAGE}": no match for platform in manifest: not found', "the node's architecture"),
    ],
)
def test_the_cause_is_named_with_what_to_do(message: str, cause: str) -> None:
    backing_off = f'Back-off pulling image "{IMAGE}": {message}'
    sentences = {why_not_pulled(Waiting("any", text, IMAGE), a_spec(**TUNE)) for text in (message, backing_off)}
    assert len(sentences) == 1, "it changed from one try to the next"
    (sentence,) = sentences
    assert sentence.startswith(f'image "{IMAGE}" cannot be pulled: ')
    assert cause in sentence


def test_a_name_is_no_cause() -> None:
    image = "example/denied-not-found:1"
    spec = a_spec(workers={"template": {"spec": {"containers": [{"name": "trainer", "image": image}]}}})
    assert why_not_pulled(Waiting("ErrImagePull", f'Back-off pulling image "{image}"', image), spec) == (
        f'image "{image}" cannot be pulled; check the image\'s name and tag, and the pull secret'
    )


def test_an_image_that_the_job_does_not_name_is_the_administrators_affair() -> None:
    lost = Waiting("ErrImagePull", "docker.io/disttrain/trainer:0.1.0: not found", "disttrain/trainer:0.1.0")
    assert why_not_pulled(lost, a_spec()) == (
        'image "disttrain/trainer:0.1.0" cannot be pulled: the registry has no such image; the job names no image, so '
        "it gets the operator's: build and push it, or name another in the chart's value trainer.image "
        "(docs/installing.md)"
    )


@pytest.mark.parametrize("reason", ["ErrImagePull", "RegistryUnavailable", "SignatureValidationFailed"])
def test_the_condition_has_one_reason_whatever_the_kubelet_calls_it(reason: str) -> None:
    world = a_world(**TUNE).settle()
    world.put(waiting(world.pod(0), reason, "the registry is unavailable"))
    world.settle()
    assert world.condition("Running")[1] == "ImagePullBackOff"
