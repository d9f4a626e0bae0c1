"""Found first by the operators of these tests: their image has no other client, which kopf imports where there is one.

It costs a third of an operator's start.
"""

raise ImportError("the operator's image has no package `kubernetes`")
