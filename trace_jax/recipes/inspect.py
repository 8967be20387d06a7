"""`trace-jax inspect`: one episode or proposal looked at from every side."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_io import nearest
from trace_jax.environments.ads.prompt import user_prompt
from trace_jax.recipes import inspect_text, programs
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.report import episode as page
from trace_jax.report.episode_facts import Facts, facts
from trace_jax.report.target import check_target
from trace_jax.simulator.accepted import CHUNK, accepted_chunks
from trace_jax.simulator.causes import CAUSE_NAMES, LEVELS
from trace_jax.simulator.identity import INDEX_LIMIT
from trace_jax.simulator.stream import composition_for, propose
from trace_jax.warehouse.materialize import SUMMARY_CHECKS
from trace_jax.warehouse.splits import EpisodeRecord, stages_of

SHOWN_ROWS = 6  # of each table
DIMENSIONS = {"campaign": (0,), "mix": (1,), "segment": (1, 2), "none": (0,)}  # of a cause's slice, by level


@dataclasses.dataclass(frozen=True)
class Proposal:
    """One draw of a stratum's stream, accepted or not."""

    cause: str
    dimensions: int
    index: int


def inspect(
    config: RunConfig,
    split: str,
    index: int | None = None,
    *,
    cause: str | None = None,
    dimensions: int | None = None,
    proposal: int | None = None,
    out: Path | None = None,
    tables: bool = False,
) -> dict[str, Any]:
    """Prints an episode as people, the agent and the oracle see it, and writes its page.

    Args:
        index: position in the split (default 0); or else
        cause, dimensions, proposal: proposal number `proposal` of a stratum of the split's stream.
        out: the page to write.
        tables: also print the first rows of every table.
    Raises:
        ConfigError: there is no such episode or proposal, or the page cannot be written.
    """
    wanted = _proposal(cause, dimensions, proposal, index)
    size, index = getattr(config.data, split), index or 0
    if wanted is None and not 0 <= index < size:
        raise ConfigError(f"--index {index}: {split} has episodes 0 to {size - 1}")
    if out is not None:
        check_target(out)
    programs.keep()
    record = episode_of(config, split, index) if wanted is None else proposal_of(config, split, wanted)
    found, question = facts(record), user_prompt(record, config.environment.prompt)
    title = (
        f"{split} {index}"
        if wanted is None
        else f"{split}, {wanted.cause}/{wanted.dimensions}, proposal {wanted.index}"
    )
    # The page first: whoever reads the text may stop in the middle.
    written = None if out is None else page.write(out, found, title, question)
    console = Console(file=sys.stdout)
    console.on_broken_pipe = _broken_pipe
    for line in inspect_text.lines(found, f"{title}: campaign {record.campaign_id}", question):
        text = Text(line)
        text.stylize("bold", 0, len(line) - len(line[12:]) if line[:1].strip() else 0)
        console.print(text, soft_wrap=True, highlight=False)
    if tables:
        for name, table in record.visible().items():
            console.print(_table(name, table))
        for name, table in record.hidden().items():
            console.print(_table(f"{name} (hidden)", table))
    if written is not None:
        console.print(Text(f"page        {written}"), soft_wrap=True)
    return _summary(found, split, index if wanted is None else wanted.index, question, written)


def _broken_pipe() -> None:
    """rich would end the program with status 1; the command line knows what a closed pipe means."""
    raise BrokenPipeError


def _proposal(cause: str | None, dimensions: int | None, proposal: int | None, index: int | None) -> Proposal | None:
    """The proposal that was asked for; None when it is an episode of the set."""
    if cause is None:
        for flag, value in (("--dimensions", dimensions), ("--proposal", proposal)):
            if value is not None:
                raise ConfigError(f"{flag} belongs to a proposal: name its --cause, or leave {flag} out")
        return None
    if index is not None:
        raise ConfigError("--index is an episode of the set, --cause names a proposal: leave one out")
    name = cause.upper().replace("-", "_")
    if name not in LEVELS:
        meant = nearest(name, CAUSE_NAMES)
        raise ConfigError(f"--cause {cause}: " + (f"did you mean {meant}?" if meant else f"one of {', '.join(LEVELS)}"))
    allowed = DIMENSIONS[LEVELS[name]]
    dimensions = allowed[0] if dimensions is None else dimensions
    if dimensions not in allowed:
        raise ConfigError(
            f"--dimensions {dimensions}: slices of {name} have {' or '.join(map(str, allowed))} attributes"
        )
    proposal = proposal or 0
    if not 0 <= proposal < INDEX_LIMIT:
        raise ConfigError(f"--proposal {proposal}: use 0 to {INDEX_LIMIT - 1}")
    return Proposal(name, dimensions, proposal)


def episode_of(config: RunConfig, split: str, index: int) -> EpisodeRecord:
    """Episode `index` of a split, as `splits.load_split` has it; of its stage, only the chunks up to its own are
    simulated."""
    stage = next(s for s in stages_of(config, split, getattr(config.data, split)) if index < s.stop)
    number, position = divmod(index - stage.start, CHUNK)
    upto = min(stage.size, (number + 1) * CHUNK)
    composition = composition_for(stage.simulator, stage.size)
    with Interrupt() as interrupt, Progress().bar(split, upto) as bar:

        def report(done: int, _: int) -> None:
            bar.update(min(done, upto))
            interrupt.check()

        chunks = accepted_chunks(stage.simulator, config.data.seed, stage.stream, composition, on_progress=report)
        for part in chunks:
            if part.number == number:
                return EpisodeRecord(index, split, part.batch, part.verdict, position)
    raise AssertionError("the composition has as many episodes as the stage")


def proposal_of(config: RunConfig, split: str, proposal: Proposal) -> EpisodeRecord:
    """One proposal, whether the oracle accepts it or not."""
    smallest = dataclasses.replace(config.simulator, batch=1)  # filled up to one block; the episode is the same
    with Interrupt() as interrupt:
        batch, verdict = propose(
            smallest, config.data.seed, split, proposal.cause, proposal.dimensions, np.array([proposal.index])
        )
        interrupt.check()
    return EpisodeRecord(proposal.index, split, batch, verdict, 0)


def _summary(found: Facts, split: str, index: int, question: str, written: Path | None) -> dict[str, Any]:
    record = found.record
    return {
        "split": split,
        "index": index,
        "campaign_id": record.campaign_id,
        "cause": record.cause,
        "driver": [{"dimension": a, "value": v} for a, v in record.driver],
        "type": record.type,
        "profile": record.profile,
        "strength": record.strength,
        "onset": record.onset,
        "prompt": question,
        "tables": {name: table.num_rows for name, table in record.visible().items()},
        "verdict": {name: round(float(getattr(record.verdict, name)[record.position]), 3) for name in SUMMARY_CHECKS},
        "accept": found.accepted,
        "failing": list(found.failing),
        "confounders": {c.name: round(c.size, 4) for c in found.confounders},
        "margins": [
            {"kind": m.kind, "name": m.name, "value": round(m.value, 3), "needed": m.needed, "unit": m.unit}
            for m in found.margins
        ],
        "page": None if written is None else str(written),
    }


def _table(title: str, table: pa.Table) -> Table:
    out = Table(title=f"{title}: {table.num_rows} rows", title_justify="left", caption_justify="left")
    for name in table.column_names:
        out.add_column(name, overflow="fold")
    for row in table.slice(0, SHOWN_ROWS).to_pylist():
        out.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    if table.num_rows > SHOWN_ROWS:
        out.caption = f"... {table.num_rows - SHOWN_ROWS} more"
    return out
