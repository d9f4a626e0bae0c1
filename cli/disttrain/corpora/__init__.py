"""Text becomes a corpus: `disttrain data`. Imports no torch.

settings.py (what is asked) -> sources.py (files, cut into a part for each shard) -> run.py (what is missing, in the
processes of pool.py): segments.py (parts, cut into what a process does at a time) -> documents.py, tables.py (its
text) -> encoders.py (tokens) -> segment_file.py -> shard.py (segments in a row). prepare.py begins it and writes the
manifest; look.py tells what a folder holds.
"""
