"""The closed vocabulary of the campaign world: attributes and their values, causes, onset profiles.

Integer codes used everywhere in the simulator index these tuples. Source of the twelve causes: arXiv 2609.10315.
"""

from __future__ import annotations

from dataclasses import dataclass

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "ad_product": ("SPONSORED_PRODUCTS", "SPONSORED_BRANDS", "SPONSORED_DISPLAY"),
    "targeting_type": ("KEYWORD", "PRODUCT", "AUTO"),
    "match_type": ("EXACT", "PHRASE", "BROAD"),
    "placement": ("TOP_OF_SEARCH", "REST_OF_SEARCH", "PRODUCT_PAGE"),
    "price_band": ("LOW", "MID", "HIGH"),
    "audience": ("PROSPECTING", "RETARGETING", "LOYAL"),
    "device": ("MOBILE", "DESKTOP", "TABLET"),
    "geo": ("US", "UK", "DE", "JP"),
}
ATTRIBUTE_NAMES: tuple[str, ...] = tuple(ATTRIBUTES)
ATTRIBUTE_SIZES: tuple[int, ...] = tuple(len(v) for v in ATTRIBUTES.values())

# Attributes in which an intervention can be localised (a driver slice uses one or two of them).
DRIVER_ATTRIBUTES: tuple[str, ...] = ("placement", "audience", "device", "geo")

VERTICALS: tuple[str, ...] = ("ELECTRONICS", "FASHION", "HOME", "BEAUTY", "GROCERY", "SPORTS")
STRATEGIES: tuple[str, ...] = ("BALANCED", "SEARCH_HEAVY", "ACQUISITION", "LOYALTY")
PROFILES: tuple[str, ...] = ("immediate", "delayed", "ramp")
METRICS: tuple[str, ...] = ("ctr", "cvr", "cpc")

NO_SIGNAL = "NO_SIGNAL"


@dataclass(frozen=True)
class CauseInfo:
    """Level of a cause and the attributes its driver slice may start from (empty: no slice)."""

    name: str
    level: str  # "campaign" | "mix" | "segment" | "none"
    drivers: tuple[str, ...] = ()


CAUSES: tuple[CauseInfo, ...] = (
    CauseInfo("BID_INCREASE", "campaign"),
    CauseInfo("BUDGET_CAP", "campaign"),
    CauseInfo("PAGE_DEGRADATION", "campaign"),
    CauseInfo("OUT_OF_STOCK", "campaign"),
    CauseInfo("PLACEMENT_SHIFT", "mix", ("placement",)),
    CauseInfo("TARGETING_BROADENING", "mix", ("audience",)),
    CauseInfo("TARGETING_NARROWING", "mix", ("audience",)),
    CauseInfo("CREATIVE_FATIGUE", "segment", ("placement", "device", "geo")),
    CauseInfo("COMPETITIVE_PRESSURE", "segment", ("geo",)),
    CauseInfo("AD_QUALITY_DROP", "segment", ("device",)),
    CauseInfo("AUDIENCE_SATURATION", "segment", ("audience",)),
    CauseInfo(NO_SIGNAL, "none"),
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
