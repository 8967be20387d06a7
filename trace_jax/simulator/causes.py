"""The registry of causes: one entry says what a cause does, how it shows, where it may sit and how to describe it.

Adding a cause is adding one `Cause` to `CAUSES` (NO_SIGNAL stays last). Simulator, oracle, prompts, answers, tables and
metrics read the registry; nothing else names a cause. Source of the twelve: arXiv 2609.10315.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Channels through which a cause may act, and the unit of an effect (natural logarithms of multipliers):
#   volume    V of equation (1): impressions of the whole campaign
#   ctr, cvr, cpc    F of equation (1): inside the slice for segment causes, else everywhere
#   mix       R of equation (1): weight of the slice's segments
#   in_stock  share of the catalogue in stock; CVR follows with `SimulatorParams.stock_elasticity`
#   budget    daily budget relative to what the campaign would spend; delivery stops when it is used up
CHANNELS: tuple[str, ...] = ("volume", "ctr", "cvr", "cpc", "mix", "in_stock", "budget")

# What a signature may say of a feature. "up"/"down": primary, must be detected; "some up"/"some down": a companion with
# a lower bar; "flat": must not move. A feature that is not named is free.
PRIMARY = {"up": 1, "down": -1}
COMPANION = {"some up": 1, "some down": -1}
FLAT = "flat"


@dataclass(frozen=True)
class Cause:
    """One root cause.

    Attributes:
        level: "campaign" | "mix" | "segment" | "none". Only segment causes need driver segments in the answer.
        description: the signature in words, as the full system prompt gives it.
        meaning: what happened, for readers of a diagnosis.
        drivers: attributes that the driver slice may start from; empty if the cause has no slice.
        values: if not empty, the only values of the driver attribute (mix causes).
        effects: log effect at full onset by channel, (weakest, strongest); a strength in [0, 1] interpolates.
        signature: campaign and mix causes: by `oracle.FEATURES`; segment causes: by "ctr", "cvr", "cpc", "share" of
            the slice against the rest of the campaign.
        gradual: builds up; never starts at full size.
        compensated: what the slice loses is not won elsewhere, so that total volume falls with its weight.
    """

    name: str
    level: str
    description: str
    drivers: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    effects: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    signature: Mapping[str, str] = field(default_factory=dict)
    gradual: bool = False
    compensated: bool = False
    meaning: str = ""


NO_SIGNAL = "NO_SIGNAL"
_NO_MIX = {"local": FLAT, "mix_placement": FLAT, "mix_audience": FLAT}

CAUSES: tuple[Cause, ...] = (
    Cause(
        "BID_INCREASE",
        "campaign",
        "CPC up, CTR mildly down, whole campaign",
        effects={"ctr": (-0.03, -0.20), "cpc": (0.05, 0.60)},
        signature={"cpc": "up", "ctr": "some down", "in_stock": FLAT, **_NO_MIX},
        meaning="Clicks became dearer in the whole campaign and impressions a little less worth: higher bids buy "
        "places that cost more.",
    ),
    Cause(
        "BUDGET_CAP",
        "campaign",
        "impressions, clicks and orders down, rates flat; spend meets a lower budget in budget_log",
        effects={"budget": (-0.05, -1.05)},
        signature={"volume": "down", "ctr": FLAT, "cpc": FLAT, "in_stock": FLAT, **_NO_MIX},
        meaning="The campaign was shown less at unchanged rates: the budget is used up before the day is over.",
    ),
    Cause(
        "PAGE_DEGRADATION",
        "campaign",
        "CVR down, CTR flat, orders down, stock normal",
        effects={"cvr": (-0.04, -0.80)},
        signature={"cvr": "down", "ctr": FLAT, "cpc": FLAT, "in_stock": FLAT, **_NO_MIX},
        meaning="As many people click as before, fewer of them buy: something is wrong behind the ad, on the product "
        "page or at checkout.",
    ),
    Cause(
        "OUT_OF_STOCK",
        "campaign",
        "in-stock share down, CVR down, orders down; look at inventory",
        effects={"in_stock": (-0.04, -1.0)},
        signature={"in_stock": "down", "cvr": "down", "ctr": FLAT, "cpc": FLAT, **_NO_MIX},
        meaning="Products were out of stock: people click and cannot buy.",
    ),
    Cause(
        "PLACEMENT_SHIFT",
        "mix",
        "one placement's share of impressions up, rates inside placements flat",
        drivers=("placement",),
        effects={"mix": (0.03, 1.2)},
        signature={"mix_placement": "up", "volume": FLAT, "in_stock": FLAT, "local": FLAT, "mix_audience": FLAT},
        meaning="Impressions moved to another placement. Inside each placement the rates are what they were; the "
        "totals moved because the mix did.",
    ),
    Cause(
        "TARGETING_BROADENING",
        "mix",
        "impressions up, CTR and CVR down, the prospecting audience's share up",
        drivers=("audience",),
        values=("PROSPECTING",),
        effects={"volume": (0.04, 0.70), "ctr": (-0.02, -0.35), "cvr": (-0.02, -0.35), "mix": (0.04, 1.0)},
        signature={
            "mix_audience": "up",
            "volume": "some up",
            "ctr": "some down",
            "cvr": "some down",
            "in_stock": FLAT,
            "local": FLAT,
            "mix_placement": FLAT,
        },
        meaning="The campaign reaches a wider audience: more impressions, on people who click and buy less.",
    ),
    Cause(
        "TARGETING_NARROWING",
        "mix",
        "impressions down, CTR and CVR up, one audience's share up",
        drivers=("audience",),
        values=("RETARGETING", "LOYAL"),
        effects={"volume": (-0.04, -0.70), "ctr": (0.02, 0.35), "cvr": (0.02, 0.35), "mix": (0.04, 1.0)},
        signature={
            "mix_audience": "up",
            "volume": "some down",
            "ctr": "some up",
            "cvr": "some up",
            "in_stock": FLAT,
            "local": FLAT,
            "mix_placement": FLAT,
        },
        meaning="The campaign reaches a narrower audience: fewer impressions, on people who click and buy more.",
    ),
    Cause(
        "CREATIVE_FATIGUE",
        "segment",
        "CTR down gradually inside one slice; impressions and CVR flat",
        drivers=("placement", "device", "geo"),
        effects={"ctr": (-0.08, -0.70)},
        signature={"ctr": "down", "cvr": FLAT, "cpc": FLAT, "share": FLAT},
        gradual=True,
        meaning="In this slice people click the ad less and less: they have seen it too often.",
    ),
    Cause(
        "COMPETITIVE_PRESSURE",
        "segment",
        "CPC up and CTR down inside one slice",
        drivers=("geo",),
        effects={"ctr": (-0.08, -0.55), "cpc": (0.10, 0.60)},
        signature={"ctr": "down", "cpc": "some up", "share": FLAT},
        meaning="In this slice clicks became dearer and rarer: competitors bid for the same people.",
    ),
    Cause(
        "AD_QUALITY_DROP",
        "segment",
        "impressions down, CPC up and CTR down inside one slice",
        drivers=("device",),
        effects={"ctr": (-0.08, -0.55), "cpc": (0.08, 0.50), "mix": (-0.12, -1.0)},
        signature={"ctr": "down", "cpc": "some up", "share": "some down"},
        compensated=True,  # a lost auction in one slice is not won elsewhere
        meaning="In this slice the ad is shown less, clicked less and charged more: the platform rates it lower.",
    ),
    Cause(
        "AUDIENCE_SATURATION",
        "segment",
        "CTR down gradually and CVR mildly down inside one slice",
        drivers=("audience",),
        effects={"ctr": (-0.10, -0.65), "cvr": (-0.20, -0.65)},
        signature={"ctr": "down", "cvr": "some down", "cpc": FLAT, "share": FLAT},
        gradual=True,
        meaning="In this slice people click less and less and buy a little less: most who would, have.",
    ),
    Cause(
        NO_SIGNAL,
        "none",
        "every change is within noise; weekday cycle, trend and promotions are always there",
        meaning="Nothing stands out beyond season, market, trend and noise.",
    ),
)
CAUSE_NAMES: tuple[str, ...] = tuple(c.name for c in CAUSES)
CAUSE_INDEX: dict[str, int] = {name: i for i, name in enumerate(CAUSE_NAMES)}
LEVELS: dict[str, str] = {c.name: c.level for c in CAUSES}
SEGMENT_CAUSES: tuple[str, ...] = tuple(c.name for c in CAUSES if c.level == "segment")

# Episode types of the evaluation tables.
EPISODE_TYPES: tuple[str, ...] = ("campaign", "mix", "segment_1d", "segment_2d", "no_signal")


def episode_type(cause: str, dimensions: int) -> str:
    """Row of the evaluation table that an episode belongs to (`dimensions`: attributes in its driver slice)."""
    level = LEVELS[cause]
    if level == "segment":
        return "segment_2d" if dimensions == 2 else "segment_1d"
    return "no_signal" if level == "none" else level
