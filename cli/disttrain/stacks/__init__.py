"""Stacks of the ranks of a running job, as the agents of its pods give them."""
