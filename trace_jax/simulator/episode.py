"""Pytrees that the simulator produces. Axis letters: E episodes, T days, G segments, S siblings, A attributes,
H channels, C confounders, K candidate slices."""

from __future__ import annotations

import chex
from jaxtyping import Array, Bool, Float, Int

NOT_COMPARED = 1e6  # margin of a rival that is none


@chex.dataclass(frozen=True)
class EpisodeBatch:
    """E campaigns observed for T days, with the hidden intervention.

    Everything up to `sibling_*` is visible to the agent; the fields under "hidden" never are. Padded segments
    (`segment_mask` false) hold zeros. Days [0, T/2) are the baseline, [T/2, T) the intervention window.
    """

    index: Int[Array, " E"]  # index of the proposal in its stream
    campaign_id: Int[Array, " E"]  # positive int32, unique identity drawn from the stream
    advertiser_id: Int[Array, " E"]
    start_day: Int[Array, " E"]  # first day, in days since 2024-01-01 (a Monday)
    vertical: Int[Array, " E"]  # code into VERTICALS
    strategy: Int[Array, " E"]  # code into STRATEGIES
    segment_values: Int[Array, "E G A"]  # code of each attribute of each active segment, ATTRIBUTE_NAMES order
    segment_mask: Bool[Array, "E G"]

    impressions: Int[Array, "E T G"]  # count
    clicks: Int[Array, "E T G"]  # count, <= impressions
    orders: Int[Array, "E T G"]  # count, <= clicks
    spend: Float[Array, "E T G"]  # account currency
    sales: Float[Array, "E T G"]  # account currency

    day_mask: Bool[Array, "E T"]  # false: the day is missing from every table (its entries here are zeros)
    budget: Float[Array, "E T"]  # daily budget of the campaign, account currency
    in_stock: Float[Array, "E T"]  # fraction of the catalogue in stock, [0, 1]
    page_views: Int[Array, "E T"]
    brand_searches: Int[Array, "E T"]

    sibling_id: Int[Array, "E S"]
    sibling_impressions: Int[Array, "E S T"]
    sibling_clicks: Int[Array, "E S T"]
    sibling_orders: Int[Array, "E S T"]
    sibling_spend: Float[Array, "E S T"]
    sibling_sales: Float[Array, "E S T"]
    sibling_budget: Float[Array, "E S T"]
    sibling_in_stock: Float[Array, "E S T"]
    sibling_page_views: Int[Array, "E S T"]
    sibling_brand_searches: Int[Array, "E S T"]

    # hidden
    cause: Int[Array, " E"]  # code into CAUSES
    slice_attributes: Int[Array, "E 2"]  # attribute codes (ATTRIBUTE_NAMES order) of the driver slice, -1 unused
    slice_values: Int[Array, "E 2"]  # value codes, -1 unused
    strength: Float[Array, " E"]  # in [0, 1], position inside the cause's range of effect sizes
    profile: Int[Array, " E"]  # code into PROFILES
    onset: Int[Array, " E"]  # first affected day, >= T/2
    effects: Float[Array, "E H"]  # log effect at full onset by channel (causes.CHANNELS)
    confounders: Float[Array, "E C"]  # signed log size at its peak, 0: absent (confounders.CONFOUNDER_NAMES)


@chex.dataclass(frozen=True)
class Verdict:
    """What the oracle verifier found (arXiv 2609.10315). Margins are positive when the check passes."""

    accept: Bool[Array, " E"]
    detectability: Float[Array, " E"]  # z of the label's weakest required signature minus its threshold
    confounder: Float[Array, " E"]  # label's z minus the strongest confounder's z
    rival_cause: Float[Array, " E"]  # smallest margin by which another cause is eliminated
    rival_slice: Float[Array, " E"]  # smallest of slice_margins; 0 for causes without driver segments
    cause_margins: Float[Array, "E causes"]  # by which each cause is eliminated; NOT_COMPARED for the label itself
    slice_margins: Float[Array, "E K"]  # log-likelihood by which each slice is eliminated, or NOT_COMPARED
    # At the level of the label (slice or campaign): impressions (share of impressions in a slice, else volume
    # against the siblings), CTR, CVR, CPC, in-stock share.
    evidence_z: Float[Array, "E M"]
    # Natural-log change of the same: of a slice against the rest of the campaign, of a campaign against its siblings.
    evidence_change: Float[Array, "E M"]
