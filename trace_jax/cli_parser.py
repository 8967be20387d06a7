"""What the command line accepts: commands, their flags and their help. `trace_jax.cli` runs them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from trace_jax import cli_capability, cli_diagnose, config_io
from trace_jax.config import ConfigError
from trace_jax.recipes import shipped, studies
from trace_jax.recipes.studies import STUDIES
from trace_jax.recipes.tracking import SERVICES

TRAINING = ("train", "sft", "grpo")
FIXED = ("export", "report")  # show a run as it was: no configuration of their own
ADS_ONLY = ("simulate", "inspect", "play", "certify", "fit-rules", "diagnose")  # look at the advertising world itself
# Agents without a policy, see `recipes.domain`.
SCRIPTED = ("analyst", "contribution", "adtributor", "squeeze", "riskloc", "scan", "ceiling", "explorer", "solver")
_BENCHES = {
    "sim": "episodes a second of the simulator and of its oracle",
    "tools": "loading of episodes and calls of the agent's tool, against bare DuckDB",
    "rollout": "the sampling engine beside other samplers; takes about 5 minutes, whatever the configuration",
    "learner": "tokens a second of a training step",
    "probe": "turn credit: all turns of a trajectory in one pass, against a pass for each",
}
_LATEST = (
    "best is GRPO's checkpoint with the best validation reward, latest is GRPO's policy if the run has one, else SFT's "
    "(default: latest)"
)
_STYLE = "wording of the question: full sentences, or the short one a nano policy reads (default: full)"
_SPLIT = "which episodes: train, validation or the held-out test (default: test)"
_DRY_RUN = (
    "print the resolved configuration and stop",
    "print the resolved configuration and a plan (sizes, memory, answers that limits would cut off) and stop",
)
_PROFILE = "trace N training steps of each stage, after its first two, into profile/ of the run, for xprof (default: 3)"
_INIT = "start a new run from the policy of this run: grpo from its SFT policy, others from an imported one"
_TRACK = "also send the figures of metrics.jsonl there; wandb reads WANDB_PROJECT, WANDB_MODE and so on"
SPLITS = ("train", "validation", "test")
COMMANDS = {
    "simulate": "make verified episodes: Parquet data sets and a manifest",
    "inspect": "show one episode or proposal: curves, the hidden cause, the oracle's margins",
    "play": "investigate an episode yourself, with the agent's tool, and be graded",
    "certify": "measure what labels are worth: acceptance, likelihood ceiling, difficulty; write a note",
    "train": "the whole recipe: tokenizer, teacher, SFT, GRPO, held-out evaluation, export, report",
    "sft": "the recipe up to the end of supervised fine-tuning",
    "grpo": "GRPO, in a run whose SFT is done or in a new one from its policy (--init)",
    "eval": "score a run's policy or a baseline on held-out episodes",
    "fit-rules": "fit the rules of the baselines contribution to scan on the training split",
    "diagnose": "investigate your own tables: CSV, Parquet or DuckDB, with a trained policy or the analyst",
    "capability": "find what a policy lacks: contrast of failed and passed attempts",
    "import": "begin a run with an open checkpoint: Hugging Face layout (safetensors), or a GGUF file",
    "export": "write a run's policy in Hugging Face layout (safetensors), or its adapters for PEFT",
    "bench": "throughput as a share of what this machine can do: sim, tools, rollout, learner, probe",
    "compile": "compile a run for TPUs or GPUs that need not be there: memory, FLOPs, collectives, a verdict",
    "reproduce": "a paper's ablation table at the size of a configuration",
    "report": "one self-contained HTML page of a run, finished or not, or of two beside each other",
}


class Parser(argparse.ArgumentParser):
    """argparse that reports bad usage through `ConfigError` (argparse itself prints a usage block)."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


class _Once(argparse.Action):
    """A directory that may be given in two ways, but not as two."""

    def __call__(self, parser, namespace, values, option_string=None):
        known = getattr(namespace, self.dest, None)
        if values is None:  # a positional one that is not there
            return
        if known not in (None, values):
            parser.error(f"two runs, {known} and {values}: show the second one beside the first with --compare")
        setattr(namespace, self.dest, values)


def _count(text: str) -> int:
    """A positive number. ValueError otherwise, which argparse reports."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _bytes(text: str) -> int:
    """A size such as 5GB, 500MB or 2.5 (GB). argparse reports any other."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) *([KMGT]?)B?", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * 10 ** {"K": 3, "M": 6, "T": 12}.get(found[2].upper(), 9)) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give one such as 500MB or 5GB")
    return size


_count.__name__ = "number"  # argparse: invalid number value


def build() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="trace-jax",
        description="Train agents that find out why a metric moved.",
        epilog="Any field of the configuration can be set with --section.field value, e.g. --grpo.steps 20.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trace-jax {metadata.version('trace-jax')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, text in COMMANDS.items():
        p = commands.add_parser(name, help=text, description=text, allow_abbrev=False, epilog=parser.epilog)
        p.set_defaults(config=None)
        if name == "capability":
            cli_capability.build(p)
            continue
        if name in FIXED:
            p.epilog = None
        else:
            p.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration (default: built-in values)")
        p.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        if name in (*TRAINING, "simulate"):
            p.add_argument("--dry-run", action="store_true", help=_DRY_RUN[name == "grpo"])
        if name == "diagnose":
            cli_diagnose.build(p)
        if name == "import":
            whose = "directory with config.json and safetensors, or a GGUF file"
            p.add_argument("--from", dest="source", type=Path, required=True, metavar="PATH", help=whose)
            p.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="directory of the new run")
        if name in (*TRAINING, "eval", "export", "report"):
            new = name in ("train", "sft", "grpo")
            help_text = "default for new runs: runs/<config>-<date>" if new else "directory of the run"
            once = {"action": _Once} if name == "report" else {}
            p.add_argument("--run-dir", type=Path, metavar="DIR", help=help_text, **once)
        if name in TRAINING:
            p.add_argument("--resume", action="store_true", help="continue the run in --run-dir where it stopped")
            p.add_argument("--profile", type=_count, nargs="?", const=3, default=0, metavar="N", help=_PROFILE)
            p.add_argument("--track", choices=SERVICES, help=_TRACK)
        if name in TRAINING:
            p.add_argument("--init", type=Path, metavar="DIR", help=_INIT)
        if name == "simulate":
            p.add_argument("--out", type=Path, default=Path("data"), metavar="DIR", help="default: data")
            p.add_argument("--episodes", type=int, metavar="N", help="one split of N episodes instead of data.*")
            p.add_argument("--seed", dest="data_seed", metavar="S", help="same as --data.seed")
            p.add_argument(
                "--difficulty",
                dest="simulator_difficulty",
                metavar="LEVEL",
                help="easy, paper or hard; same as --simulator.difficulty",
            )
            p.add_argument("--composition", default="paper", choices=("paper", "balanced"), help="mix of causes")
            p.add_argument("--split", action="append", choices=SPLITS, help="only this split (may be repeated)")
            p.add_argument("--resume", action="store_true", help="continue the data set in --out where it stopped")
            export = "CSV files shaped like this platform's reports instead, one or two an episode, and truth.json"
            p.add_argument("--export", choices=("amazon", "google", "meta"), help=export)
        if name == "certify":
            p.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="default: docs")
            p.add_argument("--episodes", type=int, default=1200, metavar="N", help="proposals at each setting")
        if name == "inspect":
            p.add_argument("--split", default="test", choices=SPLITS, help=_SPLIT)
            p.add_argument("--index", type=int, metavar="I", help="position in the split, from 0 (default: 0)")
            p.add_argument("--cause", metavar="NAME", help="a proposal of this cause instead, accepted or not")
            p.add_argument("--dimensions", type=int, metavar="D", help="attributes in the proposal's slice: 0, 1 or 2")
            p.add_argument("--proposal", type=int, metavar="I", help="number of the proposal, from 0 (default: 0)")
            p.add_argument("--out", type=Path, metavar="FILE", help="also write one self-contained HTML page")
            p.add_argument("--tables", action="store_true", help="also print the first rows of every table")
            p.add_argument(
                "--trajectory",
                type=Path,
                metavar="FILE",
                help="an investigation of a policy instead, number --index of a file in a run's trajectories/ (or of a "
                "run directory: of its newest), with what each turn was worth",
            )
        if name == "play":
            p.add_argument("--split", default="test", choices=SPLITS, help=_SPLIT)
            p.add_argument("--index", type=int, metavar="I", help="position in the split, from 0 (default: drawn)")
            p.add_argument("--seed", type=int, metavar="S", help="draws the episode (default: another one every time)")
            p.add_argument("--style", dest="environment_prompt", choices=("full", "compact"), help=_STYLE)
            p.add_argument("--out", type=Path, metavar="FILE", help="also keep the transcript, as JSON")
            p.add_argument("--run-dir", type=Path, metavar="DIR", help="a run whose policy's answers are shown, too")
        if name == "eval":
            p.add_argument("--split", default="test", choices=SPLITS, help=_SPLIT)
            agents = ("latest", "best", "grpo", "sft", "untrained", shipped.AGENT, *SCRIPTED, "endpoint")
            whose = (
                "whom to score: a stage of the run, the untrained policy, the small policy that comes with trace-jax "
                "(shipped, needs no run), a prompted model behind an endpoint, or one without a policy (of ads the "
                "analyst, contribution, adtributor, squeeze, riskloc, scan or ceiling; "
                f"of search the explorer or the solver); {_LATEST}"
            )
            p.add_argument("--agent", default="latest", choices=agents, help=whose)
            url = "with --agent endpoint: base URL of an OpenAI-compatible interface; same as --endpoint.url"
            p.add_argument("--endpoint", dest="endpoint_url", metavar="URL", help=url)
            model = "with --agent endpoint: its name there; same as --endpoint.model"
            p.add_argument("--model", dest="endpoint_model", metavar="NAME", help=model)
            fixed = "score on a fixed set instead of the run's test split (ads; hard); same as --evaluation.set"
            p.add_argument("--set", dest="evaluation_set", metavar="NAME", help=fixed)
            pair = (
                "instead: the second against the first, on the same episodes and from stored results; each is a run "
                "directory, RUN:AGENT, or an agent of --run-dir"
            )
            p.add_argument("--compare", nargs=2, metavar=("A", "B"), help=pair)
            whole = (
                "instead: one table of all agents whose results these run directories hold, with the paper's figures "
                "beside them and each run's policy tested against scan and analyst"
            )
            p.add_argument("--table", nargs="+", type=Path, metavar="RUN", help=whole)
            p.add_argument("--out", type=Path, metavar="DIR", help="with --table: also write table.json and table.md")
        if name == "fit-rules":
            p.add_argument("--out", type=Path, default=Path("rules.json"), metavar="FILE", help="default: rules.json")
            p.add_argument("--episodes", type=_count, metavar="N", help="so many of the training split (default: all)")
            kept = "a run whose configuration and training split to use"
            p.add_argument("--run-dir", type=Path, metavar="DIR", help=kept)
        if name == "bench":
            p.formatter_class = argparse.RawDescriptionHelpFormatter
            p.description = f"{text}\n\nKIND is one of\n" + "".join(f"  {k:9s}{t}\n" for k, t in _BENCHES.items())
            p.add_argument("kind", choices=tuple(_BENCHES), metavar="KIND", help=", ".join(_BENCHES))
            p.add_argument(
                "--repeats", type=int, default=5, metavar="N", help="timed rounds; medians are reported (default: 5)"
            )
            whose = "for probe: a run whose SFT is done, to measure the probe's share of its GRPO steps"
            p.add_argument("--run-dir", type=Path, metavar="DIR", help=whose)
            p.add_argument(
                "--peers",
                metavar="PYTHON",
                help="for rollout and learner: an interpreter with torch and transformers (default: this one)",
            )
        if name == "compile":
            p.epilog = f"Exit status: 0 the run fits, 1 it does not, 2 bad input. {parser.epilog}"
            where = "chips to compile for: v5e:4x4, v5p:4x4x8 (needs the extra tpu), h100x8, h200x16 (an estimate)"
            p.add_argument("--topology", required=True, metavar="NAME", help=where)
            p.add_argument("--rollout", action="store_true", help="also compile the sampler: prefill and decoding")
            p.add_argument("--out", type=Path, metavar="DIR", help="also write <config>.json and <config>.md there")
        if name == "reproduce":
            p.formatter_class = argparse.RawDescriptionHelpFormatter
            p.description = f"{text}\n\nSTUDY is one of\n" + "".join(
                f"  {k:13s}{s.about}\n{' ' * 15}{', '.join(map(repr, s.variants))}\n" for k, s in STUDIES.items()
            )
            for study, scored in studies.SCORED.items():
                p.description += f"  {study:13s}{scored.about}\n{' ' * 15}{', '.join(map(repr, scored.rows))}\n"
            names = (*STUDIES, *studies.SCORED, studies.PLANTED, studies.TARGETING)
            planted = ", ".join(map(repr, studies.PLANTED_VARIANTS))
            p.description += f"  {studies.PLANTED}  {studies.PLANTED_ABOUT}\n{' ' * 15}{planted}\n"
            p.description += f"  {studies.TARGETING}  {studies.TARGETING_ABOUT}\n"
            shape = ", ".join(f"{k} {v}" for k, v in next(iter(STUDIES.values())).shape.items())
            p.description += f"\nA study of GRPO sets these fields of grpo for all of its runs: {shape}.\n"
            shape = ", ".join(f"{k} {v}" for k, v in studies.SCORED_SHAPE.items())
            p.description += f"{' and '.join(studies.SCORED)} set these: {shape}; with --init, the run's lessons are "
            p.description += "used for all seeds, and its policy for its own seed.\n"
            p.add_argument("study", choices=names, metavar="STUDY", help=", ".join(names))
            p.add_argument(
                "--init", type=Path, metavar="DIR", help="start from the SFT policy of this run (default: train one)"
            )
            p.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the runs and the table go")
            seeds = f"default: 0 1 2, of {studies.PLANTED} 0 to {studies.PLANTED_SEEDS[-1]}"
            p.add_argument("--seeds", type=int, nargs="+", metavar="S", help=seeds)
            p.add_argument("--variants", nargs="+", default=[], metavar="NAME", help="default: all of the study")
            p.add_argument("--steps", type=_count, metavar="N", help="of each run (default: as the study says)")
            of = f"of {studies.TARGETING}: "
            tries = f"{of}episodes of each try of a world (default: 100)"
            p.add_argument("--world-seeds", type=_count, metavar="N", help=tries)
            attempts = f"{of}attempts at each (default: 16)"
            p.add_argument("--world-rollouts", type=_count, metavar="K", help=attempts)
            gate = f"{of}train a gate over base and adapters, too, for so many steps on the task (default: none)"
            p.add_argument("--gate-steps", type=_count, metavar="N", help=gate)
        if name == "report":
            whose = "directory of the run; the same as --run-dir"
            p.add_argument("run_dir", type=Path, nargs="?", metavar="RUN", action=_Once, help=whose)
            p.add_argument("--compare", type=Path, metavar="OTHER", help="a second run, shown beside the first")
            kept = "trajectories of each run on the page, spread over its stages (default: 2000)"
            p.add_argument("--trajectories", type=_count, default=2000, metavar="N", help=kept)
            p.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the run directory")
        if name == "export":
            stage = f"whose policy to write; {_LATEST}"
            stages = ("latest", "best", "grpo", "sft", "base")
            p.add_argument("--stage", default="latest", choices=stages, help=f"{stage}; base: as it was imported")
            form = (
                "hf: the whole policy, adapters merged (default) | peft: the adapters alone | shipped: as hf, with its "
                "configuration and its score on the test split, which takes about a minute"
            )
            p.add_argument("--format", default="hf", choices=("hf", "peft", "shipped"), help=form)
            types = ("float32", "bfloat16", "float16")
            kept = "of the weights (default: as they were imported, float32 of a policy from scratch)"
            p.add_argument("--dtype", choices=types, help=kept)
            p.add_argument(
                "--shard-size",
                type=_bytes,
                metavar="SIZE",
                help="a weight file gets no larger, e.g. 500MB (default: 5GB)",
            )
            p.add_argument(
                "--out",
                type=Path,
                metavar="DIR",
                help="default: export, adapter (peft) or shipped in the run directory, NAME-STAGE for an older policy",
            )
    return parser


def split_overrides(argv: Sequence[str], flags: set[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separates `--section.field value` (also `--section.field=value`) from the command's own flags.

    Raises:
        ConfigError: an option that is neither, or a field without a value.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        field = name[2:].replace("-", "_")
        if not word.startswith("--") or word == "--" or name in flags:
            rest.append(word)
            continue
        if field not in config_io.names():
            meant = config_io.nearest(name[2:], [f[2:] for f in flags] + config_io.names())
            raise ConfigError(f"unknown option {name}" + (f": did you mean --{meant}?" if meant else ""))
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise ConfigError(f"{name} needs a value: {name} VALUE")
        overrides.append((field, value))
    return rest, overrides


def flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> set[str]:
    """Options that are not fields of the configuration: the parser's own and those of the command in `argv`."""
    sub = parser._subparsers._group_actions[0].choices.get(command_of(argv))  # type: ignore[union-attr]
    known = [parser] if sub is None else [parser, sub]
    if sub is not None and sub._subparsers is not None:  # an option of another action is argparse's to refuse
        known += sub._subparsers._group_actions[0].choices.values()  # type: ignore[union-attr]
    return {option for p in known for option in p._option_string_actions}


def command_of(argv: Sequence[str]) -> str | None:
    """The command's name: the first word that is no option."""
    return next((w for w in argv if not w.startswith("-")), None)
