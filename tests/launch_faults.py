"""`trace-jax` with faults of process 1. Started by test_launch_processes.py: it is slow in its first collection, and
its disk is full when it hands on its third; waits are reported after a second. With `follower` as the first word, by
test_launch_spanning.py: its device is lost in the middle of a collection that process 0 leads."""

import errno
import os
import sys
import time

from trace_jax import cli
from trace_jax.recipes import distributed, processes
from trace_jax.rollout.calls import Calls


def lose_a_device() -> None:
    draw, drawn = Calls.draw, []

    def faulty(self, *args):
        drawn.append(args)
        if len(drawn) == 6:
            raise RuntimeError("the device is lost")
        return draw(self, *args)

    Calls.draw = faulty


def main() -> int:
    if sys.argv[1] == "follower":
        sys.argv.pop(1)
        if os.environ["TRACE_JAX_PROCESS"] == "1":
            lose_a_device()
        return cli.main()
    distributed.SLOW_SECONDS = 1.0
    if os.environ["TRACE_JAX_PROCESS"] == "1":
        write, written = processes.write_parquet, []

        def faulty(path, trajectories, step=0):
            written.append(path)
            if len(written) == 1:
                time.sleep(8)
            if len(written) == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(path, trajectories, step)

        processes.write_parquet = faulty
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
