"""Tokenised corpora as they lie in a folder. Imports no torch, so that preparing and inspecting start at once.

manifest.py (what a folder says it holds) -> files.py (reads ranges of numbers) -> corpus.py (checks one against the
other) -> spans.py (what is trained on and what is held out) -> stream.py (tokens of those, in order).
"""
