"""What looking at energy and utilisation costs a training: the same work with and without the sampler, in turns.

Ratios of CPU time, in one run: of the same work, and what the sampler's threads take of all that the process takes.

`python benchmarks/metering.py [--rounds 10] [--seconds 10] [--every 1.0] [--estimate]`
"""

import argparse
import statistics
import threading
import time

import jax
import jax.numpy as jnp

from sparring.metering.sampler import Sampler


@jax.jit
def work(x: jax.Array) -> jax.Array:
    for _ in range(10):
        x = jnp.tanh(x @ x) / 4
    return x


def rate(seconds: float) -> float:
    """Updates by CPU second of this process."""
    x = jnp.ones((256, 256))
    work(x).block_until_ready()
    began, cpu, done = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        work(x).block_until_ready()
        sum(i * i for i in range(2000))  # a loop's own Python, which shares the interpreter with the sampler
        done += 1
    return done / (time.process_time() - cpu)


ended = [0.0]  # CPU seconds of threads that are gone: CodeCarbon starts one for each of its own looks


def count_threads() -> None:
    run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def counted(self: threading.Thread) -> None:
        try:
            run(self)
        finally:
            ended[0] += time.thread_time()

    threading.Thread._bootstrap_inner = counted  # type: ignore[attr-defined]


def spent() -> float:
    """CPU seconds of the threads that measure: the sampler's and CodeCarbon's, no others of Python."""
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    now = sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in others if thread.ident)
    return now + ended[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--estimate", action="store_true", help="with CodeCarbon")
    o = parser.parse_args()
    count_threads()
    rate(1.0)
    by_cpu, by_thread = [], []
    for number in range(o.rounds):
        found = {}
        for metered in (False, True) if number % 2 else (True, False):
            if not metered:
                found[metered] = rate(o.seconds)
                continue
            with Sampler(o.every, estimate=o.estimate) as sampler:
                end = time.monotonic() + 30
                while o.estimate and not sampler.sources and time.monotonic() < end:  # CodeCarbon gets ready
                    time.sleep(0.1)
                cpu, threads = time.process_time(), spent()
                found[metered] = rate(o.seconds)
                by_thread.append((spent() - threads) / (time.process_time() - cpu))
        by_cpu.append(found[False] / found[True])
        print(f"round {number + 1}: CPU × {by_cpu[-1]:.4f}, of it the sampler {by_thread[-1]:.2%}", flush=True)
    print("\n| looks every | CPU of the same work | the sampler's part of all CPU |\n|---|---|---|")
    print(f"| {o.every:g} s | × {statistics.median(by_cpu):.4f} | {statistics.median(by_thread):.2%} |")


if __name__ == "__main__":
    main()
