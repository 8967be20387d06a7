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
