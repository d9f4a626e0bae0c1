"""The API server that is played for the tests of the command."""

from tests.unit.cli.conftest import api

__all__ = ["api"]
