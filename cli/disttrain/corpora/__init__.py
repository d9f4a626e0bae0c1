"""Text becomes a corpus: `disttrain data`. Imports no torch.

settings.py (what is asked) -> sources.py (files, cut into parts) -> for each part, in a process of pool.py: its text
(documents.py, tables.py) -> tokens of the text (encoders.py) -> files of the tokens (shard.py); prepare.py runs
them and writes the manifest; look.py tells what a folder holds.
"""
