"""The policies, one per file. Each answers for a Situation with a Transition or None; decide.py puts them in order."""
