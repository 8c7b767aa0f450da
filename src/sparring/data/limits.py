"""Files may be anybody's: how much of one is taken into memory at once, and errors for people from the libraries that
read them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from sparring.errors import InputError, SparringError

__all__ = ["MOST_BYTES", "errors_naming", "lines_of", "require_size"]

MOST_BYTES = 1 << 30  # of one array, one episode, one file's columns: ours have some 64 MB
LINE = 256 << 20  # characters: a line of RLlib's is a batch


def require_size(size: int, what: object) -> None:
    """ValueError before memory is taken."""
    if size > MOST_BYTES:
        raise ValueError(f"{what} has {size >> 20} MiB when unpacked, at most {MOST_BYTES >> 20} are read at once")


@contextmanager
def errors_naming(where: object) -> Iterator[None]:
    """Whatever a reader raises for what is in a file becomes an InputError that names it. MemoryError, too: a file that
    says how large it is may lie."""
    try:
        yield
    except SparringError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise InputError(f"{where}: {error}") from error
    except (OSError, EOFError, MemoryError) as error:
        raise InputError(f"{where} cannot be read: {error or type(error).__name__}") from error
    except Exception as error:  # zipfile's, zlib's, csv's, Arrow's, and of NumPy's headers
        own = ("zipfile", "zlib", "struct", "_csv", "pyarrow", "h5py", "tokenize")
        if type(error).__module__.partition(".")[0] not in own and not isinstance(error, SyntaxError):
            raise
        raise InputError(f"{where} cannot be read: {error}") from error


def lines_of(file: IO[str], where: object, most: int = LINE) -> Iterator[str]:
    """The lines of a file, none of them endless."""
    while line := file.readline(most + 1):
        if len(line) > most:
            raise InputError(f"{where} has a line of more than {most:,} characters")
        yield line
