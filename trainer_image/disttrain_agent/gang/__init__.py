"""The agents of a job's pods, which let all ranks of the job start again together (`restartStrategy: InPlace`).

Worker 0's agent leads: the others keep a connection to it, over which they have proved the key of the attempt.

    member -> leader   joins, failed, ended     a rank has failed; no rank of this pod is left, nor what they started
    leader -> member   stop, start              end all ranks; all pods have ended theirs: start those of the next life
    either side        leaves, alive            no rank starts again in this attempt: each pod ends as without InPlace

Every message names a generation, which is the number of starts before it. leader.py and member.py decide, and are pure.
"""
