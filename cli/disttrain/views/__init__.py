"""Views of jobs: pure functions of raw objects and a time."""
