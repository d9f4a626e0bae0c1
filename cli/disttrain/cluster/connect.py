"""Which API server, as whom, in which namespace: a kubeconfig, else the pod that this runs in."""

from disttrain.errors import CommandError
from disttrain_operator.kube import kubeconfig
from disttrain_operator.kube.auth import Access
from disttrain_operator.kube.errors import AccessError

_ADVICE = "set KUBECONFIG or --context, or use `disttrain run` without a cluster"


def find_access(context: str | None = None) -> Access:
    """Return address and credentials of an API server. Raises CommandError with what to do."""
    try:
        return kubeconfig.find_access(context=context)
    except Exception as error:  # a kubeconfig may hold anything
        said = str(error) if isinstance(error, AccessError) else f"the kubeconfig cannot be read ({error!r})"
        raise CommandError(f"no cluster to talk to: {' '.join(said.split())}; {_ADVICE}") from error
