"""The agents of a job's pods, which let all ranks of the job start again together (`restartStrategy: InPlace`).

Worker 0's agent leads: the others keep a connection to it, over which they have proved the key of the attempt.

    member -> leader   joins, failed, ended     a rank has failed; no rank of this pod is left, nor what they started
    member -> leader   departs                  the pod is to end (SIGTERM): another one may take its place
    leader -> member   stop, start              end all ranks; all pods have ended theirs: start those of the next life
    either side        leaves, alive            no rank starts again in this attempt: each pod ends as without InPlace

Every message names a generation, which is the number of starts before it. leader.py and member.py decide, and are pure.
A pod that the operator has made in place of a lost one joins amid a restart, with a number that is higher than that of
any former pod of its worker, and starts its ranks with the next generation. If it is worker 0's, it leads: the others
have waited without a connection, and tell it with `joins` what it must know, which their leader told them with `start`.
"""
