"""Jobs in processes of their own, none of which outlives this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from disttrain_trainer.data.corpora.manifest import CorpusError

Job = TypeVar("Job")
Result = TypeVar("Result")

_WAITING = 2
"""Jobs that are ready for processes that end theirs."""


def run_jobs(
    work: Callable[[Job], Result], following: Callable[[], Job | None], workers: int
) -> Iterator[tuple[Job, Result]]:
    """Yield each job with its result as it ends. Raises what the first one raises that fails, and ends the others.

    work: a function of a module, called in one of `workers` processes; in this one where there is but one worker.
    following: returns the next job, None where there is none until another one has ended. It is called when a
    process will soon be free, so that no more than a few jobs exist at a time.
    """
    if workers == 1:
        while (job := following()) is not None:
            yield job, work(job)
        return
    others = set(multiprocessing.active_children())
    # Spawned: this process may have threads, which a fork would not have.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_prepare_process) as pool:
        running: dict[Future[Result], Job] = {}
        try:
            while True:
                while len(running) < workers + _WAITING and (job := following()) is not None:
                    running[pool.submit(work, job)] = job
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            raise CorpusError("a worker was killed, perhaps for lack of memory: use fewer --workers") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            # A segment may take seconds yet; where all are done, these are idle.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()


def _prepare_process() -> None:
    """Have this process end when its parent does, also where that is killed. A terminal's Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One process per core is asked for; threads of the library would only wait for each other.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_it() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_it, name="parent", daemon=True).start()
