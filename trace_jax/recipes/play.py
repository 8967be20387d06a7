"""`trace-jax play`: a person investigates one episode with the agent's own tool and is graded like the agent."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_io import nearest
from trace_jax.environments import tools
from trace_jax.environments.ads.analyst import Transcript
from trace_jax.environments.ads.answer import parse_lenient
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.environments.base import Reward
from trace_jax.recipes import inspect, play_after, programs
from trace_jax.recipes.interrupt import Interrupted
from trace_jax.recipes.play_answer import Unclear, answer_text, cause_of
from trace_jax.recipes.play_input import code_of
from trace_jax.recipes.play_terminal import Reader, Screen, Stops
from trace_jax.recipes.rundir import stored_config
from trace_jax.simulator.causes import CAUSE_NAMES, CAUSES, SEGMENT_CAUSES
from trace_jax.simulator.vocabulary import ATTRIBUTES
from trace_jax.warehouse.files import disk, replace
from trace_jax.warehouse.schema import COLUMNS, GRAIN, VISIBLE_TABLES
from trace_jax.warehouse.splits import EpisodeRecord, EpisodeSet

GENERATOR = "trace-jax play"  # in every transcript
HELP = (
    ("SQL", "runs as the agent's call sql(...); SQL ends with ; or an empty line"),
    ("", "it also ends where a command follows, or outside brackets a line that begins with WITH, DESCRIBE, SHOW or"),
    ("", "SUMMARIZE, or with SELECT or FROM if it has that already; before Python it needs its ;"),
    ("Python", "a line runs as the agent's call, and variables are kept; it goes on in the next line after an open"),
    ("", "bracket, string or block or a final \\, until an empty line"),
    (".tables", "the tables and what a row of each is"),
    (".schema [TABLE]", "columns and types"),
    (".causes", "the causes and how each shows"),
    (".slices", "dimensions and values that an answer may name"),
    (".hint", "run the scripted analyst's next query as your own call"),
    (".history", "the calls so far"),
    (".answer CAUSE [dimension=value ...]", "answer, be graded, end; .answer alone asks; JSON is taken as it is"),
    (".quit", "end without an answer"),
)
COMMANDS = tuple(name.split()[0] for name, _ in HELP if name.startswith(".")) + (".help",)
_ALIASES = {"help": ".help", "?": ".help", "quit": ".quit", "exit": ".quit", ".exit": ".quit"}


@dataclass(frozen=True)
class Call:
    """One tool call."""

    entry: str  # as typed
    code: str  # as the tool ran it
    text: str
    status: str  # as `Observation` has it
    seconds: float
    hint: bool


def play(
    config: RunConfig,
    split: str,
    index: int | None = None,
    *,
    seed: int | None = None,
    out: Path | None = None,
    run_dir: Path | None = None,
) -> dict[str, Any]:
    """One episode from the question to the grade.

    Args:
        index: position in the split; without it one is drawn from `seed`, without a seed any.
        out: file of the transcript.
        run_dir: a run whose policy's answers to this episode are shown afterwards.
    Raises:
        ConfigError: there is no such episode or run, or the transcript cannot be written.
        Interrupted: left by Ctrl-C; the transcript is written.
    """
    index = _chosen(index, seed, split, getattr(config.data, split))
    if run_dir is not None:
        stored_config(run_dir)
    if out is not None:
        _check_out(out)
    programs.keep()
    record = inspect.episode_of(config, split, index)
    screen = Screen()
    with Session(config, record, screen) as session:
        try:
            session.run()
        finally:
            if out is not None:
                transcript = json.dumps({"generator": GENERATOR} | session.transcript(), indent=1, ensure_ascii=False)
                with disk(out):
                    replace(out, f"{transcript}\n".encode(errors="replace"))
        session.tell(run_dir)
    if out is not None:
        screen.say(f"transcript  {out}")
    return session.summary() | {"transcript": None if out is None else str(out)}


def _chosen(index: int | None, seed: int | None, split: str, size: int) -> int:
    if index is None:
        if seed is not None and seed < 0:
            raise ConfigError(f"--seed {seed}: use 0 or more")
        return int(np.random.default_rng(seed).integers(size))
    if seed is not None:
        raise ConfigError("--index names the episode, --seed draws one: leave one out")
    if not 0 <= index < size:
        raise ConfigError(f"--index {index}: {split} has episodes 0 to {size - 1}")
    return index


def _check_out(out: Path) -> None:
    """Refuse, before the work, a transcript that could not or should not be written."""
    if out.is_dir():
        raise ConfigError(f"--out {out} is a directory: name a file, e.g. {out / 'transcript.json'}")
    with disk(out):
        if out.exists() and not (out.is_file() and GENERATOR.encode() in out.read_bytes()[:100]):
            raise ConfigError(f"--out {out} exists and is no transcript of {GENERATOR}: choose another file")
        out.parent.mkdir(parents=True, exist_ok=True)
        trial = out.with_name(out.name + ".partial")  # what the transcript is written to first
        trial.touch()
        trial.unlink()
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"cannot write {out}: no permission in {out.parent}; choose another --out")


class Session:
    """One attempt of a person at an episode."""

    def __init__(self, config: RunConfig, record: EpisodeRecord, screen: Screen):
        self._config, self._record, self._screen = config, record, screen
        environment = AdsEnvironment(EpisodeSet(record.batch, record.verdict, record.split), config.environment)
        self._task = environment.task(record.position)
        self._episode = environment.open(self._task)
        self._stops = Stops(tools.stop_calls)
        names = [*COMMANDS, *CAUSE_NAMES, *ATTRIBUTES, *(v for values in ATTRIBUTES.values() for v in values)]
        names += [*VISIBLE_TABLES, *(c for table in VISIBLE_TABLES for c in COLUMNS[table])]
        self._reader = Reader(sorted(set(names)))
        self.calls: list[Call] = []
        self.hints = 0
        self.answer: str | None = None
        self.reward: Reward | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self._episode.close()

    @property
    def title(self) -> str:
        """Which episode it is."""
        return f"{self._record.split} {self._record.index}"

    @functools.cached_property
    def _analyst(self) -> Transcript:
        return play_after.investigate(self._record, self._config)

    # The conversation

    def run(self) -> None:
        """From the question to an answer or its absence.

        Raises:
            Interrupted: by a second Ctrl-C in a row or SIGTERM.
        """
        with self._stops:
            self._ask()
            cancelled = False
            while self.answer is None:
                try:
                    entry = self._reader.entry(f"{len(self.calls) + 1}> ")
                    cancelled = False
                    if entry is None or _ALIASES.get(entry, entry) == ".quit":
                        self._screen.say("not graded")
                        return
                    self._do(entry)
                except Unclear as unclear:
                    self._screen.say(str(unclear), "yellow")
                except KeyboardInterrupt:
                    if cancelled or self._stops.signal != signal.SIGINT:
                        raise Interrupted(128 + self._stops.signal) from None
                    cancelled = True
                    self._screen.say("\ncancelled; once more leaves")

    def _ask(self) -> None:
        limits, turns = self._config.environment, self._config.rollout.max_turns
        self._screen.say(f" {self.title} ".center(80, "─"), "bold")
        self._screen.prose(self._task.system)
        self._screen.say()
        self._screen.prose(self._task.user, "bold")
        self._screen.say()
        self._screen.prose(
            "Type SQL or Python. SQL ends with ; or an empty line. `.answer CAUSE [dimension=value ...]` ends and "
            "grades; .help lists the rest.\n"
            "Compare with the sibling campaigns first: market moves hit all of them.\n"
            f"The agent has {turns} turns (calls and the answer), {limits.tool_seconds:g} s a call, and reads "
            f"{limits.tool_characters} characters of each result."
        )
        self._screen.say()

    def _do(self, entry: str) -> None:
        entry = _ALIASES.get(entry, entry)
        if not entry or entry.startswith("#"):
            return
        if entry.startswith("."):
            self._command(entry)
        elif _is_answer(entry):
            self._grade(entry)
        else:
            self._call(entry, code_of(entry))

    def _command(self, entry: str) -> None:
        name, _, rest = entry.partition(" ")
        name, rest = name.lower(), rest.strip()
        simple: dict[str, Callable[[], None]] = {
            ".help": lambda: self._screen.table(("type", "to"), HELP),
            ".tables": self._tables,
            ".causes": self._causes,
            ".slices": lambda: self._screen.table(
                ("dimension", "values"), [(a, ", ".join(values)) for a, values in ATTRIBUTES.items()]
            ),
            ".hint": self._hint,
            ".history": self._history,
        }
        if name == ".answer":
            self._answer(rest)
        elif name == ".schema":
            self._schema(rest)
        elif name in simple:
            simple[name]()
        else:
            meant = nearest(name, COMMANDS)
            raise Unclear(f"no command {name}: " + (f"did you mean {meant}?" if meant else ".help lists them"))

    def _call(self, entry: str, code: str, hint: bool = False) -> None:
        before, begun = self._stops.count, time.monotonic()
        seen = self._episode.step(code)
        if self._stops.count > before:
            raise KeyboardInterrupt
        self.calls.append(Call(entry, code, seen.text, seen.status, round(time.monotonic() - begun, 3), hint))
        self._screen.say(seen.text, "red" if seen.error else "")
        turns = self._config.rollout.max_turns
        if len(self.calls) == turns - 1:
            self._screen.say(f"(the agent would have to answer now: it has {turns} turns; you may go on)", "yellow")

    # Commands

    def _tables(self) -> None:
        rows = [(name, str(table.num_rows), ", ".join(GRAIN[name])) for name, table in self._record.visible().items()]
        self._screen.table(("table", "rows", "one row for each"), rows)

    def _schema(self, name: str) -> None:
        name = name.strip("\"';").lower()
        if name and name not in VISIBLE_TABLES:
            meant = nearest(name, VISIBLE_TABLES)
            mend = f"did you mean {meant}?" if meant else f"one of {', '.join(VISIBLE_TABLES)}"
            raise Unclear(f"no table {name}: {mend}")
        for table in [name] if name else VISIBLE_TABLES:
            self._screen.table((table, "type"), list(COLUMNS[table].items()))

    def _causes(self) -> None:
        rows = [(str(n), cause.name, cause.level, cause.description) for n, cause in enumerate(CAUSES, 1)]
        self._screen.table(("no.", "cause", "level", "second half against the first"), rows)

    def _hint(self) -> None:
        before = self._stops.count
        steps = self._analyst.steps
        if self._stops.count > before:  # it investigated with a query that was stopped
            del self._analyst
            raise KeyboardInterrupt
        if self.hints == len(steps):
            self._screen.say("the analyst asks nothing more: it answers now")
            return
        code = steps[self.hints][0]
        query = play_after.query_of(code)
        words = play_after.step_in_words(query)
        scale = " (z: standard errors; below -4 or above 4 is loud)" if " z of " in f" {words}" else ""
        self._screen.say(f"{words}{scale}\n{query}", "cyan")
        self._call(".hint", code, hint=True)
        self.hints += 1

    def _history(self) -> None:
        rows = [
            (str(n), call.status, textwrap.shorten(call.code, 100, placeholder=" ..."))
            for n, call in enumerate(self.calls, 1)
        ]
        self._screen.table(("call", "status", "code"), rows)

    def _answer(self, typed: str) -> None:
        """`.answer`; asks for the cause if there is none, and then, or at a terminal, for a slice that is missing."""
        guided = not typed
        if guided:
            self._causes()
            typed = self._until("cause (number or name)> ", cause_of) or ""
        answer = answer_text(typed) if typed else None
        if answer is not None and not typed.startswith("{") and (guided or self._reader.interactive):
            decision = parse_lenient(answer)
            if decision.root_cause in SEGMENT_CAUSES and not decision.driver_segments:
                self._screen.say("in which slice, e.g. device=MOBILE or placement=PRODUCT_PAGE geo=US?")
                ask = lambda text: answer_text(f"{decision.root_cause} {text}")  # noqa: E731
                answer = self._until("slice (empty: not known)> ", ask, empty=answer)
        if answer is None:
            self._screen.say("no answer given")
        else:
            self._grade(answer)

    def _until(self, prompt: str, understood: Callable[[str], str], empty: str | None = None) -> str | None:
        """What the first line means that is understood; `empty` for an empty one, None at the end of the input."""
        while (typed := self._reader.line(prompt)) is not None:
            try:
                return understood(typed.strip()) if typed.strip() else empty
            except Unclear as unclear:
                self._screen.say(str(unclear), "yellow")
        return None

    def _grade(self, answer: str) -> None:
        self.answer, self.reward = answer, self._episode.grade(answer)

    # Afterwards

    def tell(self, run_dir: Path | None) -> None:
        """The grade, the truth and how others went about it; nothing without an answer."""
        if self.answer is None:
            return
        record, environment = self._record, self._config.environment
        self._screen.say()
        lines = play_after.grade_lines(self.answer, self.reward, environment, record.cause)
        self._screen.say("\n".join(lines), "bold green" if self.reward.info["full_right"] else "bold red")
        hints = f", {self.hints} of them the analyst's" if self.hints else ""
        calls, turns = _count(len(self.calls), "call"), _count(len(self.calls) + 1, "turn")
        self._screen.say(f"effort      {calls}{hints}; {turns}, the agent has {self._config.rollout.max_turns}")
        self._screen.say("\n".join(play_after.truth_lines(record, self.title, self._task.user)))
        self._screen.say()
        self._screen.say("\n".join(play_after.analyst_lines(self._analyst, self._episode.grade(self._analyst.answer))))
        if run_dir is not None:
            self._screen.say("\n".join(play_after.policy_lines(run_dir, self._config, record)))

    def summary(self) -> dict[str, Any]:
        """Episode, effort and, of a graded attempt, answer, reward and truth."""
        record, reward = self._record, self.reward
        found = {
            "episode": {"split": record.split, "index": record.index, "campaign_id": record.campaign_id},
            "style": self._config.environment.prompt,
            "calls": len(self.calls),
            "turns": len(self.calls) + (self.answer is not None),
            "hints": self.hints,
            "graded": reward is not None,
        }
        graded = dict.fromkeys(("answer", "reward", "parts", "info", "right_cause", "right_slice"))
        if reward is not None:
            graded |= {"answer": self.answer, "reward": reward.total, "parts": dict(reward.parts)}
            graded |= {"info": dict(reward.info), "right_cause": record.cause}
            graded["right_slice"] = play_after.segments(record.driver)
        return found | graded

    def transcript(self) -> dict[str, Any]:
        """All that was read and typed, and the summary. Tells no truth of an attempt without an answer."""
        return {
            "version": metadata.version("trace-jax"),
            "system": self._task.system,
            "question": self._task.user,
            "steps": [asdict(call) for call in self.calls],
        } | self.summary()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _is_answer(entry: str) -> bool:
    """Whether an entry is the JSON of an answer and not a Python dict."""
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(entry) if entry.startswith("{") else {}
        return bool({"decision", "root_cause"} & body.keys()) and parse_lenient(entry) is not None
    return False
