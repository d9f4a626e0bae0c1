"""Stacks of a rank of `disttrain run`: the agent of its worker is asked on the loopback interface."""

import json

import urllib3

from disttrain.errors import CommandError
from disttrain.local.folder import AGENTS_FILE, RunFolder
from disttrain_api.agent_api import STACKS
from disttrain_api.agent_token import agent_token
from disttrain_api.names import TOKEN_FILE, TOKEN_HEADER
from disttrain_api.stacks import MAX_WHOLE_STACKS_BYTES, decode_stacks, main_thread_first

_TIMEOUT = urllib3.Timeout(connect=5, read=30)
_POOL = urllib3.PoolManager(retries=False, timeout=_TIMEOUT)


def stacks_of_run(folder: RunFolder, rank: int, ranks_per_pod: int) -> str:
    """Return the stacks of a rank of a run. Raises CommandError where it gives none."""
    index = rank // ranks_per_pod
    try:
        ports = json.loads((folder.config / AGENTS_FILE).read_text())
        token = (folder.config / TOKEN_FILE).read_text()
        port = int(ports[index])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise CommandError(f"worker {index} has no agent that could be asked: {error}") from error
    try:
        response = _POOL.request(
            "GET",
            f"http://127.0.0.1:{port}{STACKS.path}",
            headers={TOKEN_HEADER: agent_token(token)},
            preload_content=False,
            redirect=False,
        )
        answer = response.read(MAX_WHOLE_STACKS_BYTES + 1)
        response.release_conn()
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise CommandError(f"the agent of worker {index} does not answer: does the run still go on?") from error
    found = decode_stacks(answer, range(rank, rank + 1), MAX_WHOLE_STACKS_BYTES) if response.status == 200 else {}
    if rank not in found:
        raise CommandError(f"rank {rank} gives no stacks now")
    return main_thread_first(found[rank])
