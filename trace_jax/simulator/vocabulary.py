"""The closed vocabulary of the campaign world: attributes and their values.

Integer codes used everywhere in the simulator index these tuples. The causes are in `simulator.causes`.
"""

from __future__ import annotations

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
