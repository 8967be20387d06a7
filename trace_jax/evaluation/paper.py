"""What arXiv 2609.10315 reports, in the form of our results: Qwen3.5-35B-A3B unless said, FullAttr@1 by type.

Its simulator, prompts and episodes differ from ours: for reference only.
"""

from __future__ import annotations

from trace_jax.evaluation.metrics import PAPER_ROWS


def _reported(*values: float | None) -> dict:
    """A result of the values of `PAPER_ROWS`, in their order."""
    result: dict = {"by_type": {}}
    for (_, path, _), value in zip(PAPER_ROWS, values, strict=True):
        node = result if len(path) == 1 else result[path[0]]
        node[path[-1]] = {"value": value, "low": None, "high": None}
    return result


def _ablation(full: float, one: float, two: float, no_signal: float) -> dict:
    return _reported(None, full, None, None, None, None, one, two, no_signal, None, None)


PAPER: dict[str, dict] = {
    "untrained": _reported(0.184, 0.159, 0.370, 0.596, 0.46, 0.48, 0.04, 0.01, 0.41, 0.53, 22.05),
    "sft": _reported(0.685, 0.637, 0.762, 0.958, 0.99, 0.98, 0.71, 0.04, 0.76, 1.00, 10.75),
    "grpo": _reported(0.823, 0.757, 0.851, 0.928, 0.95, 1.00, 0.92, 0.27, 0.49, 1.00, 11.73),
}
LABELS = {"untrained": "paper base", "sft": "paper SFT", "grpo": "paper SFT->RL"}
NOTE = "paper: reported in arXiv 2609.10315 for a 35B model in that paper's own environment; for reference only"

# All that it reports, by what it is of: agents, and the ablation of GRPO from SFT.
ROWS: dict[str, dict] = {
    "base": PAPER["untrained"],
    "SFT": PAPER["sft"],
    "RL from base": _reported(0.471, 0.434, 0.711, 0.913, None, None, 0.51, 0.03, 0.28, 0.68, 16.04),
    "SFT -> RL": PAPER["grpo"],
    "SFT -> RL, graded reward only": _ablation(0.596, 0.67, 0.00, 0.64),
    "SFT -> RL, KL": _ablation(0.724, 0.92, 0.16, 0.30),
    "Claude Opus 5, prompted": _reported(0.764, 0.686, 0.809, 0.913, 0.95, 0.98, 0.68, 0.33, 0.87, 0.99, None),
}
