"""What the scheduler and the API server's admission say of a pod that they refuse -> what to do.

Both give one reason for very different things, and advice that fits one of them misleads about the others: no waiting
helps a pod that selects nodes by a label that none has.
"""

_SELECTOR = "correct nodeSelector and affinity in the template: `kubectl get nodes --show-labels` shows what nodes have"
NO_ROOM = "wait for room, or ask for fewer or smaller pods"
_OF_SCHEDULER: tuple[tuple[tuple[str, ...], str], ...] = (
    (("insufficient ", "too many pods"), NO_ROOM),
    (
        ("pod's node affinity",),
        _SELECTOR,
    ),
    (
        ("untolerated taint",),
        "give the template a toleration for that taint, or wait for other nodes",
    ),
    (
        ("pod anti-affinity", "pod affinity", "topology spread"),
        "relax the template's podAffinity, podAntiAffinity or topologySpreadConstraints, or ask for fewer pods",
    ),
    (("were unschedulable",), "`kubectl uncordon` lets pods onto a cordoned node again"),
    (
        ("free ports for the requested pod ports",),
        "wait until the program that has that port on the node ends, or name other ports in the template",
    ),
)
"""What stands in the message, in lower case, and what to do about it."""
_CONTROL_PLANE = ("{node-role.kubernetes.io/control-plane: }", "{node-role.kubernetes.io/master: }")
"""Taints with which clusters keep all pods off their control plane: no job is to tolerate them."""

_OF_ADMISSION: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("violates podsecurity",),
        "make the template follow the namespace's Pod Security level, or ask an administrator for another level",
    ),
    (
        ("serviceaccount",),
        "create the service account, or name another one in the template: `kubectl get serviceaccounts` lists them",
    ),
    (
        ("priorityclass",),
        "name a priority class that the cluster has: `kubectl get priorityclasses` lists them",
    ),
    (
        ("runtimeclass",),
        "name a runtime class that the cluster has: `kubectl get runtimeclasses` lists them",
    ),
    (
        ("per container is", "per pod is", "limit to request ratio"),
        "keep to the LimitRange of the namespace, which `kubectl describe limitranges` shows",
    ),
    (
        ("admission webhook",),
        "make the template follow the rule of that webhook, or ask who runs it",
    ),
)


ON_NODES = frozenset({NO_ROOM, _SELECTOR})
"""Advice that says less than what no node has."""
EVERY_ADVICE = tuple(advice for _, advice in (*_OF_SCHEDULER, *_OF_ADMISSION))


def what_to_do_about_scheduling(message: str) -> str:
    """Return advice for a pod that the scheduler placed on no node, for all that its message names."""
    # What follows says whether preemption would help, in other words.
    whole = others = message.split(" preemption:")[0].lower()
    for taint in _CONTROL_PLANE:
        others = others.replace(f"untolerated taint {taint}", "")
    return _for_all(others) or _for_all(whole) or NO_ROOM


def what_to_do_about_refusal(message: str) -> str | None:
    """Return advice for a pod that admission forbade; None where it is of no known kind."""
    text = message.lower()
    return next((advice for patterns, advice in _OF_ADMISSION if _any(patterns, text)), None)


def _for_all(text: str) -> str:
    return "; ".join(advice for patterns, advice in _OF_SCHEDULER if _any(patterns, text))


def _any(patterns: tuple[str, ...], text: str) -> bool:
    return any(pattern in text for pattern in patterns)
