"""The process of one rank. Exit code 0: all was right; 1: wrong elements, or the ranks did not meet; 2: usage."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from disttrain_agent.environment import termination_log
from disttrain_agent.reports import TerminationMessage
from disttrain_api.attempt_key import attempt_key
from disttrain_api.handshake import Refused
from disttrain_api.mesh import Mesh
from disttrain_api.names import CONFIG_DIR, CONFIG_FILE, Env, ExitCode
from disttrain_api.pod_address import is_loopback
from disttrain_api.report import RankError, RankFailure, decode_pod_report
from disttrain_trainer.checks.collectives.check import check
from disttrain_trainer.checks.collectives.plan import Plan, parse
from disttrain_trainer.checks.collectives.results import Row, tables, to_json, verdict
from disttrain_trainer.runtime.config import read_token
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.errors import TrainerError, describe, one_line
from disttrain_trainer.runtime.hosts import stay_on_loopback
from disttrain_trainer.runtime.mesh import World, device_mesh_of
from disttrain_trainer.runtime.rendezvous.forwarder import Place
from disttrain_trainer.runtime.rendezvous.store import open_store
from disttrain_trainer.runtime.unpickler import restrict_unpickling

# A collective that hangs is a result, too: nobody should wait the usual ten minutes for it.
TIMEOUT = timedelta(minutes=2)


def main(plan: Plan, json_path: str | None) -> int:
    """Meet the others, check, and let rank 0 tell."""
    rank, size = _number(Env.RANK, 0), _number(Env.WORLD_SIZE, 1)
    if size < 2:
        print("disttrain: WORLD_SIZE is 1, expected two ranks or more: one rank has nobody to talk to", file=sys.stderr)
        return 2
    try:
        world = join(rank, size)
        rows: list[Row] = []
        for found in check(plan, world):
            rows += found
            if world.first and json_path != "-":
                print(tables(found), flush=True)
    except ValueError as error:
        print(f"disttrain: --groups: {error}", file=sys.stderr)
        return 2
    except (dist.DistError, RuntimeError, OSError, Refused, TrainerError) as error:
        print(f"disttrain: rank {rank} of {size}: {one_line(error)}", file=sys.stderr)
        leave(rank, describe(error))
        return 1
    if world.first:
        print_results(rows, json_path)
    world.leave()
    return 1 if any(row.wrong for row in rows) else 0


def join(rank: int, size: int) -> World:
    """This rank among the others, met by MASTER_ADDR and MASTER_PORT. Raises DistError where they do not come."""
    restrict_unpickling()
    device = find_device(
        _number(Env.LOCAL_RANK, rank), _number(Env.LOCAL_WORLD_SIZE, size), "OMP_NUM_THREADS" in os.environ
    )
    store = open_store(place_of(os.environ, rank, size), TIMEOUT)
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    mesh = Mesh(replicate=size)
    return World(rank, size, device, mesh, device_mesh_of(mesh, device), store)


def place_of(environment: Mapping[str, str], rank: int, size: int) -> Place:
    """Return the place of the rendezvous, and the key if there is a token. Raises InvalidConfiguration if there must be
    one."""
    host, port = environment.get(Env.MASTER_ADDR) or "", _number(Env.MASTER_PORT, 0)
    alone = is_loopback(host)
    if alone:
        stay_on_loopback()
    token = read_token(Path(environment.get(Env.CONFIG) or Path(CONFIG_DIR, CONFIG_FILE)).parent, required=not alone)
    uid, attempt = environment.get(Env.JOB_UID) or "", _number(Env.ATTEMPT, 1)
    return Place(host, port, rank, size, attempt_key(token, "rendezvous", uid, attempt) if token else None)


def print_results(rows: list[Row], json_path: str | None) -> None:
    """Return the message of rank 0 at the end."""
    if json_path == "-":
        print(to_json(rows), flush=True)
        return
    print(verdict(rows), flush=True)
    if json_path is not None:
        Path(json_path).write_text(to_json(rows))


def leave(rank: int, why: RankError) -> None:
    """Tell the operator, in the pod's termination message: of several ranks the one that only lost another gives way,
    whichever ends first."""
    if not os.environ.get(Env.JOB_UID):
        return
    path, former = termination_log(os.environ), None
    with suppress(OSError):
        former = decode_pod_report(path.read_bytes().decode(errors="replace"))
    if why.exit_code == ExitCode.PEER_LOST and former is not None and former.failure is not None:
        return
    failure = RankFailure(rank=rank, exit_code=why.exit_code, reason=why.reason, message=why.message)
    TerminationMessage(path).write(None, failure)


def _number(name: str, default: int) -> int:
    return int(os.environ.get(name) or default)


if __name__ == "__main__":
    code = main(*parse())
    sys.stdout.flush()
    sys.stderr.flush()
    # Without tear-down, as train.py does.
    os._exit(code)
