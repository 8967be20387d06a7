"""Published figures of accelerators. Nothing here was measured."""

from __future__ import annotations

from dataclasses import dataclass

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Chip:
    """One accelerator as its maker describes it.

    Attributes:
        name: as in a topology.
        flops: dense bfloat16 FLOP/s (no sparsity).
        hbm_bytes: memory, in the smaller reading of the published number (1 GB = 1e9 bytes).
        hbm_bandwidth: bytes/s.
        link_bandwidth: bytes/s that a chip receives from its neighbours (one direction; all links together).
        network_bandwidth: bytes/s that a chip receives over the network between slices or nodes.
        per_host: chips of one host, which one process has.
        source: where the figures are published.
    """

    name: str
    flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    per_host: int
    source: str


CHIPS = {
    chip.name: chip
    for chip in (
        # 1,600 Gbit/s of links in each direction; 6.4 Tbit/s of network for the 256 chips of a pod.
        Chip(
            "v5e", 197 * TERA, 16 * GIGA, 819 * GIGA, 200 * GIGA, 6.4 * TERA / 8 / 256, 4,
            "https://cloud.google.com/tpu/docs/v5e",
        ),
        # 4,800 Gbit/s of links in each direction; 50 Gbit/s of network a chip.
        Chip(
            "v5p", 459 * TERA, 95 * GIGA, 2765 * GIGA, 600 * GIGA, 50 * GIGA / 8, 4,
            "https://cloud.google.com/tpu/docs/v5p",
        ),
        # NVLink: 900 GB/s in both directions together; a 400 Gbit/s adapter for each GPU, as in DGX H100 and H200.
        Chip(
            "h100", 989 * TERA, 80 * GIGA, 3350 * GIGA, 450 * GIGA, 400 * GIGA / 8, 8,
            "https://www.nvidia.com/en-us/data-center/h100/ (SXM)",
        ),
        Chip(
            "h200", 989 * TERA, 141 * GIGA, 4800 * GIGA, 450 * GIGA, 400 * GIGA / 8, 8,
            "https://www.nvidia.com/en-us/data-center/h200/ (SXM)",
        ),
    )
}  # fmt: skip
