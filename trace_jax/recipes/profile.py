"""`--profile`: a trace of a few training steps for xprof (`pip install xprof`, `xprof RUN/profile`) or Perfetto."""

from __future__ import annotations

import warnings
from pathlib import Path

import jax

SKIPPED = 2  # first steps of a stage: they compile, and their time says nothing about the others


class Profiler:
    """Traces `steps` training steps of a stage after its first two.

        with Profiler(path, steps) as profiler:
            for step in range(start, end):
                profiler.step(step)
                ...

    Nothing happens when `steps` is 0. A stage that ends earlier, also with an error, leaves the steps it made.
    """

    def __init__(self, path: Path, steps: int):
        self._path, self._steps = Path(path), steps
        self._begun = 0  # steps
        self._tracing = False
        self._annotation: jax.profiler.StepTraceAnnotation | None = None

    def __enter__(self) -> Profiler:
        return self

    def step(self, number: int) -> None:
        """Begins a step; the one before ends here. `number`: how the trace calls it."""
        if not self._steps or self._begun > SKIPPED + self._steps:
            return
        self._end_step()
        self._begun += 1
        if self._begun == SKIPPED + 1:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every Python call: a trace of hundreds of megabytes
            jax.profiler.start_trace(str(self._path), profiler_options=options)
            self._tracing = True
        elif self._begun == SKIPPED + self._steps + 1:
            self._stop()
        if self._tracing:
            self._annotation = jax.profiler.StepTraceAnnotation("step", step_num=number)
            self._annotation.__enter__()

    def __exit__(self, *exc) -> None:
        self._end_step()
        self._stop()
        if self._steps and 0 < self._begun <= SKIPPED:
            warnings.warn(
                f"--profile: no trace, it begins with the {SKIPPED + 1}rd step of a stage and this one made "
                f"{self._begun}",
                stacklevel=2,
            )

    def _end_step(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None

    def _stop(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
