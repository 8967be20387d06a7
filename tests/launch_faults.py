"""`trace-jax` with faults, started by test_launch_processes.py: process 1 is slow in its first collection, and its disk
is full when it hands on its third. Waits are reported after a second."""

import errno
import os
import sys
import time

from trace_jax import cli
from trace_jax.recipes import distributed, processes


def main() -> int:
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
