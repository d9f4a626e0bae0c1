"""Files that are never seen half written, and files that others may have written."""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from secrets import token_hex
from typing import IO

from disttrain_trainer.runtime.errors import does_not_answer
from disttrain_trainer.runtime.object_path import ObjectPath

_HOLES = 16
"""How many times as long as what is stored of it a file may be. A disk may leave out zeros, and moments of rows that
were never trained are zeros; their parameters are not."""
_SMALL = 2**16
"""Bytes up to which a file may be a hole."""


def write_atomically(path: Path | ObjectPath, text: str, *, lasting: bool = True) -> None:
    """Write to a temporary name beside `path`, then rename. An object is never half written.

    lasting: whether a file must survive a power cut, which takes waiting for the disk.

    Others may write to the folder, too: nobody can foresee the name, and what has it nevertheless is not opened.
    """
    if not isinstance(path, Path):
        path.write_text(text)
        return
    temporary = path.with_name(f".{path.name}.{token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def rewrite(path: Path, text: str) -> None:
    """Replace a file of a few kB, on a full disk within the blocks that it has. Raises OSError, which names it.

    In its own blocks it can be seen half written; spaces follow where it was longer.
    """
    try:
        write_atomically(path, text)
    except OSError as full:
        try:
            with path.open("r+b", buffering=0) as file:
                file.write(text.encode().ljust(os.fstat(file.fileno()).st_size))
        except OSError:
            raise OSError(full.errno, full.strerror, str(path)) from full


def sync_folder(folder: Path | ObjectPath) -> None:
    """Make renames in `folder` survive a power cut; an object store needs no such thing."""
    if not isinstance(folder, Path):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def look_afresh(folder: Path | ObjectPath) -> None:
    """Have the next listing of `folder` come from the server of a network file system, not from this machine's cache.

    NFS may answer from a listing that is a minute old, unless this machine has just changed the folder.
    """
    if not isinstance(folder, Path):
        return
    probe = folder / f".look-{os.getpid()}-{token_hex(4)}"
    # A full disk has no room for it, and a commit needs none.
    with suppress(OSError):
        probe.touch()
        probe.unlink()


def remove_tree(path: Path | ObjectPath) -> None:
    """Delete all that lies below; what cannot be deleted stays."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.remove_tree()


class ForeignFileError(OSError):
    """A file of a kind that this program never writes; it is not read. `strerror` says why."""


def out_of_reach(error: OSError, path: Path | ObjectPath) -> bool:
    """Return whether it is the storage below `path` that does not answer, and what lies there may be sound."""
    if isinstance(error, ForeignFileError | FileNotFoundError):
        return False
    return not isinstance(path, Path) or does_not_answer(error)


def is_plain_name(name: str) -> bool:
    """Return whether a file of this name can lie nowhere but in the folder itself."""
    return name not in ("", ".", "..") and not any(sign in name for sign in "/\\\0")


def open_regular(path: Path | ObjectPath) -> AbstractContextManager[IO[bytes]]:
    """Open a file for reading. Raises ForeignFileError for a link, which may lead anywhere, for what is no file, and
    for a file that is a hole for the most part.
    """
    if not isinstance(path, Path):
        return path.open("rb")
    if path.is_symlink():
        raise ForeignFileError(None, "it is a symbolic link", str(path))
    # What is no file, such as a named pipe, must not be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ForeignFileError(None, "it is no regular file", str(path))
        require_stored(descriptor, path)
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def numbered_lines(path: Path, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, each with its number, from 1 on.

    A line of more than `most` bytes is cut to one byte more. Raises OSError.
    """
    # A volume of a ConfigMap, for example, consists of links.
    with open_regular(Path(os.path.realpath(path))) as lines:
        number = 0
        while line := lines.readline(most + 1):
            number += 1
            if len(line) > most or line.strip():
                yield number, line


def require_stored(descriptor: int, path: Path) -> None:
    """Raise ForeignFileError for an open file that is much longer than what is stored of it.

    What is left out of a file reads as zeros and takes no room on the disk, but as much memory as any other byte.
    """
    size, place = os.fstat(descriptor).st_size, os.lseek(descriptor, 0, os.SEEK_CUR)
    at = stored = 0
    try:
        # Not st_blocks: disks compress, and some file systems tell of none. One that knows no holes tells of all bytes.
        while size > _SMALL + _HOLES * stored:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, begin, os.SEEK_HOLE)
            stored += at - begin
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise ForeignFileError(
                None, f"it has {size} bytes, of which {stored} are stored and the rest are holes", str(path)
            ) from None
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    os.lseek(descriptor, place, os.SEEK_SET)


def size_of(path: Path | ObjectPath) -> int:
    """Return how many bytes can be read of a file. Raises as `open_regular`."""
    if not isinstance(path, Path):
        return int(path.stat().st_size)
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def read_linked(path: Path, most: int) -> bytes:
    """Same as `read_bounded`, but follows links: the cache of Hugging Face's Hub consists of them."""
    return read_bounded(Path(os.path.realpath(path)), most)


def read_bounded(path: Path | ObjectPath, most: int) -> bytes:
    """Return the content of a file of `most` bytes at most. Raises OSError, and ForeignFileError for a larger one."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ForeignFileError(None, f"it has more than {most} bytes", str(path))
    return content
