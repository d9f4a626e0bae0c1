"""What `import disttrain_api` offers is chosen on purpose."""

import pytest

import disttrain_api


def test_public_names_are_sorted_and_complete() -> None:
    assert disttrain_api.__all__ == sorted(disttrain_api.__all__)
    for name in disttrain_api.__all__:
        assert getattr(disttrain_api, name).__module__.startswith("disttrain_api."), name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = disttrain_api.no_such_name


def test_every_public_name_is_explained() -> None:
    assert [name for name in disttrain_api.__all__ if not getattr(disttrain_api, name).__doc__] == []


def test_the_public_names_are_these() -> None:
    """A frozen list: who adds or removes a name does so knowingly, and says so in CHANGELOG.md."""
    assert disttrain_api.__all__ == [
        "DistTrainingJob",
        "DisttrainError",
        "JobSpec",
        "JobStatus",
        "LayoutError",
        "ManifestError",
        "Mesh",
        "Violation",
        "load",
        "parse",
        "problems",
    ]
