"""`python -m disttrain_trainer.collectives_check`: whether the ranks' collectives are right, and how fast they are.

plan.py (what is asked) -> check.py (runs it) -> figures.py (what is told); operations.py calls torch, expected.py says
what each rank must hold afterwards.
"""
