"""What `trace-jax capability ACTION` accepts."""

from __future__ import annotations

import argparse
from pathlib import Path

SPLITS = ("train", "validation")  # the held-out test is for evaluation alone
STAGES = ("latest", "best", "grpo", "sft")
ACTIONS = {
    "contrast": "which capabilities failed attempts lack and passed ones do not (arXiv 2604.05336)",
    "worlds": "for each of them the difficulty at which it can be learned, at most five tries",
    "train": "one adapter for each accepted world, by GRPO on the frozen policy; or a gate over them",
    "route": "which adapter the policy itself chooses for each episode",
    "eval": "base, adapters, their sum, routed adapters and routing with the answer known, on the same episodes",
    "run": "all of these, one after another; what is done is not repeated",
}
_EXISTING = "directory of a run whose SFT is done"


def build(group: argparse.ArgumentParser) -> None:
    """Adds the actions to the parser of `capability`. All work on a run and print one JSON object on demand."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help=_EXISTING)
    shared.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    actions = group.add_subparsers(dest="action", metavar="ACTION", parser_class=type(group), required=True)
    own = {"contrast": _contrast, "worlds": _worlds, "train": _train, "route": _route, "eval": _eval, "run": _tries}
    for name, text in ACTIONS.items():
        p = actions.add_parser(name, help=text, description=text, parents=[shared], allow_abbrev=False)
        own[name](p)


def _contrast(p: argparse.ArgumentParser) -> None:
    p.epilog = "Thresholds and the labeller are fields, e.g. --capability.gap 0.3; see docs/capability.md."
    p.add_argument("--stage", choices=STAGES, help="whose policy to sample (default: latest)")
    p.add_argument("--split", choices=SPLITS, help="which episodes (default: validation)")
    p.add_argument("--episodes", type=_count, metavar="N", help="the first N of the split (default: 256, or all)")
    p.add_argument("--samples", type=_count, metavar="K", help="attempts at each (default: 4)")
    p.add_argument(
        "--trajectories", type=Path, metavar="FILE", help="contrast these, of a file of the run, and sample nothing"
    )
    p.add_argument(
        "--out", type=Path, metavar="DIR", help="default: capability/contrast-<stage>-<split> in the run directory"
    )


def _worlds(p: argparse.ArgumentParser) -> None:
    _names(p)
    _tries(p)
    p.add_argument("--out", type=Path, metavar="DIR", help="default: capability in the run directory")


def _tries(p: argparse.ArgumentParser) -> None:
    p.add_argument("--seeds", type=_count, metavar="N", help="episodes of each try (default: 100)")
    p.add_argument("--rollouts", type=_count, metavar="K", help="attempts at each (default: 16)")


def _train(p: argparse.ArgumentParser) -> None:
    p.epilog = "Fields of grpo, lora and rollout apply to every adapter, e.g. --grpo.steps 50; see docs/capability.md."
    p.add_argument(
        "--capabilities",
        nargs="+",
        default=(),
        metavar="NAME",
        help="which; also `mix`, one adapter for all worlds, and `target`, one for the task itself; `gate`, a softmax "
        "gate over base and adapters, trained on the task, and `gate_mix`, the same in all worlds (default: all "
        "accepted worlds)",
    )
    p.add_argument(
        "--out", type=Path, metavar="DIR", help="with worlds.json (default: capability in the run directory)"
    )


_ALL_SPLITS = ("train", "validation", "test")


def _route(p: argparse.ArgumentParser) -> None:
    p.add_argument("--split", default="test", choices=_ALL_SPLITS, help="which episodes (default: test)")
    p.add_argument("--out", type=Path, metavar="DIR", help="has adapters/ (default: capability in the run directory)")


def _eval(p: argparse.ArgumentParser) -> None:
    _route(p)
    p.add_argument(
        "--agents",
        nargs="+",
        default=(),
        metavar="NAME",
        help="some of base, sum, routed, oracle, the adapters and the gates (default: all)",
    )


def _names(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--capabilities",
        nargs="+",
        default=(),
        metavar="NAME",
        help="which (default: those that the newest contrast of the run kept)",
    )


def _count(text: str) -> int:
    """A positive number. ValueError otherwise, which argparse reports."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


_count.__name__ = "number"  # argparse: invalid number value
