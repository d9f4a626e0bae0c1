"""Jobs in processes of their own, none of which outlives this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from disttrain_trainer.data.corpora.manifest import CorpusError

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(work: Callable[[Job], Result], jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Result]]:
    """Yield each job with its result as it ends. Raises what the first one raises that fails, and ends the others.

    work: a function of a module, called in one of `workers` processes; in this one where there is but one worker.
    """
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            yield job, work(job)
        return
    others = set(multiprocessing.active_children())
    # Spawned: this process may have threads, which a fork would not have.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), context, initializer=_prepare_process) as pool:
        running = {pool.submit(work, job): job for job in jobs}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        except BrokenProcessPool as error:
            raise CorpusError("a worker was killed, perhaps for lack of memory: use fewer --workers") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            # A shard may take minutes yet; where all are done, these are idle.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()


def _prepare_process() -> None:
    """Have this process end when its parent does, also where that is killed. A terminal's Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One process per core is asked for; threads of the library would only wait for each other.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()
