"""What turns a clone into what clusters run: images, lock files, the chart of a release. Standard library alone."""
