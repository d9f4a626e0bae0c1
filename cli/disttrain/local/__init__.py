"""`disttrain run`: the pods of a job as processes of this machine, governed by the operator's own decisions."""
