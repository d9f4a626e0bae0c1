"""Whether the long variants of tests run: `make soak`."""

import os

SOAK = bool(os.environ.get("DISTTRAIN_SOAK"))
"""All combinations, many repeats and seeds by chance, where otherwise each part of one runs somewhere."""
