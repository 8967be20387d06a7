"""Studies of `trace-jax reproduce`: what their runs share, and what each variant sets.

Fields are of `grpo`, but for the study of planted deficits, which trains SFT policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Study:
    """Attributes:
    about: one line for the help.
    variants: fields by name of the variant; the first is what the others are compared to.
    references: variants whose turn credit asks the final policy of another variant's run with the same seed.
    shape: fields that all runs share.
    """

    about: str
    variants: Mapping[str, Mapping[str, Any]]
    shape: Mapping[str, Any] = field(default_factory=dict)
    references: Mapping[str, str] = field(default_factory=dict)


_GSPO = {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq_mean_token_mean"}
_SHAPE = {
    "steps": 40,
    "prompts": 16,
    "validate_every": 40,
    "validation_episodes": 128,
    "validation_samples": 2,
    "save_every": 40,
    "keep_best": 0,
}


def _credit(**fields: Any) -> dict[str, Any]:
    return {f"turn_credit.{k}": v for k, v in ({"enabled": True} | fields).items()}


STUDIES: dict[str, Study] = {
    "objectives": Study(
        "GRPO, Dr.GRPO, DAPO, GSPO and sampling one step behind",
        {
            "GRPO": {"objective": "grpo", "aggregation": "seq_mean_token_mean"},
            "Dr.GRPO": {
                "objective": "dr_grpo",
                "advantage_std": False,
                "aggregation": "seq_sum_constant",
                "aggregation_constant": 64.0,
            },
            "DAPO": {"objective": "dapo", "constant_groups": "resample", "overlong_buffer": 32},
            "GSPO": {"objective": "gspo", **_GSPO},
            "GRPO, one step behind": {"objective": "grpo", "aggregation": "seq_mean_token_mean", "staleness": 1},
        },
        # with one iteration, every ratio is 1 and no clip acts
        _SHAPE | {"iterations": 2, "turn_credit.enabled": False},
    ),
    "turn-credit": Study(
        "turn credit by form, look-ahead, coefficient and reference (arXiv 2607.13988)",
        {
            # coefficient 0 is GRPO; its credit is measured all the same
            "GRPO": _credit(coefficient=0.0),
            "GSPO": {"objective": "gspo", **_GSPO, **_credit(coefficient=0.0)},
            "raw delta": _credit(form="raw_delta"),
            "remaining gap": _credit(form="remaining_gap"),
            "remaining gap, initial": _credit(form="remaining_gap_initial"),
            "log-ratio": _credit(),
            "log-ratio, GSPO-token": {"objective": "gspo_token", **_GSPO, **_credit()},
            "K = 1": _credit(look_ahead=1),
            "K = 5": _credit(look_ahead=5),
            "K = 7": _credit(look_ahead=7),
            "coefficient .1": _credit(coefficient=0.1),
            "coefficient .5": _credit(coefficient=0.5),
            "later reference": _credit(),
        },
        _SHAPE,
        {"later reference": "GRPO"},
    ),
}

PLANTED = "planted-deficits"
PLANTED_ABOUT = "does the contrast find what SFT lessons left out? (arXiv 2604.05336)"
PLANTED_SEEDS = tuple(range(10))
PLANTED_CONTROL = "control"
# What the SFT teacher lacks (`sft.without`), and the capability that should be found lacking.
PLANTED_VARIANTS: dict[str, tuple[str, str]] = {
    PLANTED_CONTROL: ("", ""),
    "no two-attribute lessons": ("segment_2d", "intersection"),
    "no no-signal lessons": ("no_signal", "abstaining"),
    "no stop rule": ("stopping", "stopping"),
    "no mix lessons": ("mix", "mix_decomposition"),
    "no campaign lessons": ("campaign", "campaign_comparison"),
}

TARGETING = "capability-targeting"
TARGETING_ABOUT = "routed adapters against as many rollouts spent otherwise (arXiv 2604.05336); needs --init"


@dataclass(frozen=True)
class Row:
    """A row of a study whose policies are scored on the held-out episodes.

    Attributes:
        agent: what is scored of its run: "sft", "grpo" or "untrained".
        begins: row whose SFT policy GRPO starts from, or whose run has the untrained policy.
        fields: of its run; those of the row that it begins with hold, too.
        lessons: share of the configuration's SFT lessons, read once if it is not all of them.
        reported: the row of `evaluation.paper.ROWS` that it stands for; "": none.
    """

    agent: str
    begins: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    lessons: float = 1.0
    reported: str = ""


@dataclass(frozen=True)
class Ordering:
    """A claim: the row `higher` has more of a metric, a path into a result, than the row `lower`."""

    higher: str
    lower: str
    metric: tuple[str, ...]


@dataclass(frozen=True)
class ScoredStudy:
    """Attributes:
    about: one line for the help.
    rows: by name.
    baseline: row that the others are compared to.
    orderings: what is tested; `question`: the title of that.
    """

    about: str
    rows: Mapping[str, Row]
    baseline: str
    orderings: tuple[Ordering, ...]
    question: str


# Fields of grpo that all rows of a scored study share: the 235 episodes take the place of validation.
SCORED_SHAPE: dict[str, Any] = {"steps": 40, "validation_episodes": 0, "save_every": 20, "keep_best": 0}
_SFT, _RL = "SFT", "SFT -> RL"
_GRADED, _KL = "SFT -> RL, graded reward only", "SFT -> RL, KL"
FORMAT, FROM_FORMAT = "format lessons", "RL from format lessons"
_FULL, _TWO, _QUIET = ("full_attr_at_1",), ("by_type", "segment_2d"), ("no_signal",)
_SIGNAL = ("extra", "signal")

_SHARES = {f"{share:.0%} no-signal prompts": {"grpo.no_signal_share": share} for share in (0.2, 0.4)}
_PENALTIES = {f"penalty {p:g}": {"environment.penalty_false_cause": p} for p in (0.3, 1.0)}
_BOTH = {"20% no-signal prompts, penalty 0.3": {"grpo.no_signal_share": 0.2, "environment.penalty_false_cause": 0.3}}
_ABSTENTION = _SHARES | _PENALTIES | _BOTH

SCORED: dict[str, ScoredStudy] = {
    "causal": ScoredStudy(
        "the ablation of arXiv 2609.10315 on the held-out episodes, an SFT policy for each seed",
        {
            "untrained": Row("untrained", _SFT, reported="base"),
            # An untrained policy of this kind cannot write an answer, an untrained 35B model can: this is what a base
            # that knows the form and little else comes to here. At nano size 82 % of its answers can be read and 9 %
            # are right; with half of these lessons 11 % can be read, and RL would have nothing to begin with.
            FORMAT: Row("sft", lessons=0.32),
            _SFT: Row("sft", reported="SFT"),
            _GRADED: Row("grpo", _SFT, {"environment.reward_full": 0.0}, reported=_GRADED),
            _RL: Row("grpo", _SFT, reported=_RL),
            _KL: Row("grpo", _SFT, {"grpo.kl_coefficient": 0.005, "grpo.kl_estimator": "k3"}, reported=_KL),
            FROM_FORMAT: Row("grpo", FORMAT, reported="RL from base"),
        },
        _SFT,
        (
            Ordering(_RL, _GRADED, _FULL),
            Ordering(_RL, _GRADED, _TWO),
            Ordering(_RL, _SFT, _FULL),
            Ordering(_RL, _SFT, _TWO),
            Ordering(_SFT, _RL, _QUIET),
            Ordering(_RL, _KL, _FULL),
            Ordering(_RL, _KL, _TWO),
            Ordering(_RL, _KL, _QUIET),
            Ordering(_SFT, FROM_FORMAT, _FULL),
            Ordering(_RL, FROM_FORMAT, _FULL),
        ),
        "Does each ordering of the paper hold?",
    ),
    "abstention": ScoredStudy(
        "what keeps a policy from naming causes where nothing acted, and what that costs elsewhere",
        {_SFT: Row("sft"), _RL: Row("grpo", _SFT)} | {name: Row("grpo", _SFT, f) for name, f in _ABSTENTION.items()},
        _RL,
        (
            Ordering(_SFT, _RL, _QUIET),
            *(Ordering(name, _RL, _QUIET) for name in _ABSTENTION),
            *(Ordering(_RL, name, _SIGNAL) for name in _ABSTENTION),
        ),
        "What does each option gain without a signal, and cost with one?",
    ),
}
