"""`python -m disttrain_trainer.checks.collectives`: whether the ranks' collectives are right, and how fast they are.

plan.py (what is asked) -> check.py (runs it) -> results.py (what is told); operations.py calls torch, expected.py says
what each rank must hold afterwards.
"""
