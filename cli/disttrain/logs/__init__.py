"""Logs of a job's ranks: which pods and lines are meant (pick), and how they are read and merged (follow)."""
