"""The policies, one per file. Each answers for a Situation with a Move, or with None; decide.py puts them in order."""
