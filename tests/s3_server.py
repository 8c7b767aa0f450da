"""A real S3 server on this machine (versitygw), which can be killed and come back with what it had."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import urllib3

SCRIPT = Path(__file__).parents[1] / "scripts" / "s3-server"
ACCESS, SECRET = "test-key", "test-secret"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class S3Server:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for name in ("data", "versions"):
            (directory / name).mkdir(parents=True)
        self._binary = subprocess.run([SCRIPT], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def address(self, bucket: str, prefix: str = "bots") -> str:
        return f"s3://{bucket}/{prefix}?region=us-east-1&endpoint={self.url}"

    def start(self) -> None:
        words = [self._binary, "--access", ACCESS, "--secret", SECRET, "--port", f"127.0.0.1:{self.port}", "--quiet"]
        words += ["posix", "--versioning-dir", str(self._directory / "versions"), str(self._directory / "data")]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until = time.monotonic() + 30
        while True:
            try:
                urllib3.request("GET", self.url, timeout=5, retries=False)
                return
            except urllib3.exceptions.HTTPError:
                assert self._process.poll() is None, (self._directory / "log").read_text()
                assert time.monotonic() < until, "the S3 server does not start"
                time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
