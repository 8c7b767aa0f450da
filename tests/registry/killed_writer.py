"""The beginning of a script that is killed with kill -9 before its n-th write: `SCRIPT REGISTRY N …`."""

__all__ = ["KILLED_WRITER"]

KILLED_WRITER = """
import os, signal, sys
import obstore
put, left = obstore.put, int(sys.argv[2])
def dying(store, path, data, **options):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return put(store, path, data, **options)
obstore.put = dying
"""
