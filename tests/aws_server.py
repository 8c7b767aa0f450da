"""The AWS API on this machine (moto's server): what a stack, a role or a bucket's settings become, without AWS."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import urllib3


@contextlib.contextmanager
def aws_server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            try:
                urllib3.request("GET", f"{url}/moto-api/", timeout=5, retries=False)
                break
            except urllib3.exceptions.HTTPError:
                assert process.poll() is None, "the AWS API server does not start"
                assert time.monotonic() < until, "the AWS API server does not answer"
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()
