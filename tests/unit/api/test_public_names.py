"""What `import disttrain_api` offers is chosen on purpose."""

import disttrain_api


def test_public_names_are_sorted_and_complete() -> None:
    offered = {
        name
        for name, value in vars(disttrain_api).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("disttrain_api")
    }
    assert disttrain_api.__all__ == sorted(offered)


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
