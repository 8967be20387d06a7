"""The report of `trace-jax compile` in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GB = 1e9
WASTEFUL = 1.5  # times what has to be multiplied, from which it is told
_NAMES = {
    "parameters": "parameters",
    "base": "frozen base",
    "moments": "optimizer",
    "gradients": "gradients",
    "batch": "batches",
    "reference": "KL reference",
    "versions": "earlier versions",
    "learner_temporaries": "activations and the rest",
    "sampler_parameters": "sampler's parameters",
    "sampler_base": "sampler's frozen base",
    "kv_cache": "KV cache",
    "probe_reference": "probe's reference",
    "sampler_temporaries": "sampler's temporaries",
}


def verdict(r: dict[str, Any]) -> str:
    """One line: whether it fits, and by how much or why not."""
    used, limit = r["hbm_bytes_per_chip"] / GB, r["memory"]["limit"] / GB
    shown = f"{used:.1f} of {limit:.0f} GB a chip"
    if r["fits"]:
        return f"fits: {shown}, {r['headroom']:.0%} free"
    if r["no_sampler"]:
        return f"cannot run: {shown}; there can be no sampler: {r['no_sampler']}"
    refused = [f"{n} needs {p['refused'] / GB:.1f} GB by itself" for n, p in r["programs"].items() if p["refused"]]
    return f"does not fit: {shown}, at least 5% must stay free" + "".join(f"; {line}" for line in refused)


def suggestion(r: dict[str, Any]) -> str | None:
    """What to change, None for a run that fits."""
    found = r.get("suggestion")
    if r["fits"] or (r["no_sampler"] and found is None):
        return None
    if found is None and r["memory"]["sampler_parameters"] > r["memory"]["limit"]:
        mesh = r["sampling_mesh"] or r["mesh"]
        return (
            f"a sampling lane of {mesh['tensor']} x {mesh['expert']} chips is too small for the weights of this "
            "policy: raise mesh.expert or mesh.tensor, or take chips with more memory"
        )
    if found is None:
        return "no mesh, remat, micro-batch or number of slots makes it fit on these chips: take more of them"
    flags = " ".join(f"--{field} {value}" for field, value in found["fields"].items())
    return f"nearest that should fit ({found['hbm_bytes_per_chip'] / GB:.1f} GB, scaled, not compiled): {flags}"


def text(r: dict[str, Any]) -> str:
    """The report for a terminal."""
    label = "  (estimate: the CPU's compiler and published figures)" if r["estimate"] else ""
    lines = [
        f"{r['config']} on {r['topology']}{label}",
        f"mesh            {_mesh(r['mesh'])}"
        + (f", sampling {_mesh(r['sampling_mesh'])}" if r["sampling_mesh"] else ""),
        f"micro-batch     {r['microbatch'][0]} rows x {r['microbatch'][1]:,} tokens, remat {r['remat']}, "
        f"{r['counts']['micro_batches']} in a step of {r['counts']['sequences']} x {r['counts']['context']:,} tokens",
        "memory of a chip",
        *(f"  {_NAMES[k]:26s}{r['memory'][k] / GB:8.2f} GB" for k in _NAMES if r["memory"][k]),
        *(f"  while {k:20s}{size / GB:8.2f} GB" for k, size in r["memory"]["phases"].items() if k != "both"),
        f"model FLOPs     {r['flops']:.3g} a step",
        *_times(r),
        verdict(r),
    ]
    if hint := suggestion(r):
        lines.append(hint)
    return "\n".join(lines)


def _times(r: dict[str, Any]) -> list[str]:
    if not r["programs"]:
        return []
    chip = r["chip"]
    return [
        "a step at its bounds (seconds of one run; x runs)",
        *(_program(name, p) for name, p in r["programs"].items() if p["runs"]),
        *wasteful(r),
        "collectives of a step (GB that a chip receives)",
        *_axes(r),
        f"step            {r['roofline_step_s']:.2f} s at least, MFU at most {r['mfu_bound']:.1%} of "
        f"{chip['flops'] / 1e12:.0f} TFLOP/s ({chip['source']})",
    ]


def wasteful(r: dict[str, Any]) -> list[str]:
    """A line for each program that the compiler made multiply far more than the policy has to."""
    lines = []
    for name, p in r["programs"].items():
        wanted, done = p.get("executed_flops_per_chip"), p.get("multiplied_flops_per_chip")
        if wanted and done and done > WASTEFUL * wanted:
            lines.append(
                f"  {name} multiplies {done / wanted:.3g} times what the policy has to: look for a product that the "
                "compiler expands"
            )
    return lines


def _mesh(shape: dict[str, int]) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in shape.items())


def _program(name: str, p: dict[str, Any]) -> str:
    terms = "  ".join(f"{k} {v:.3g}" for k, v in p["seconds"].items() if v)
    return f"  {name:12s}{terms}  x {p['runs']:g}"


def _axes(r: dict[str, Any]) -> list[str]:
    sums: dict[tuple[str, str], float] = {}
    for p in r["programs"].values():
        for axes, kinds in p.get("collective_bytes_by_axis", {}).items():
            for kind, size in kinds.items():
                sums[axes, kind] = sums.get((axes, kind), 0.0) + size * p["runs"]
    return [f"  {axes:14s}{kind:20s}{size / GB:10.2f}" for (axes, kind), size in sorted(sums.items()) if size]


def markdown(r: dict[str, Any]) -> str:
    """The report as a short page."""
    how = (
        "An estimate: programs compiled by XLA for virtual CPU devices, times from published figures."
        if r["estimate"]
        else "Programs compiled ahead of time by XLA for this topology; times are bounds from published figures."
    )
    programs = [
        f"| {n} | {p['runs']:g} | {p['beside_arguments'] / GB:.2f} | {p['roofline_s']:.3g} "
        f"| {p['compile_seconds']:.0f} |"
        for n, p in r["programs"].items()
    ]
    return "\n".join(
        [
            f"# {r['config']} on {r['topology']}",
            "",
            f"{how} Written by `trace-jax compile --config configs/{r['config']}.yaml --topology {r['topology']}`; "
            f"`{r['config']}.json` beside it has all figures. Nothing here was run on such a chip.",
            "",
            f"**{verdict(r)}.**",
            "",
            "```",
            text(r),
            "```",
            "",
            "| program | runs in a step | GB besides its arguments | seconds at its bound | compiled in (s) |",
            "|---|---|---|---|---|",
            *programs,
            "",
            *_gathered(r),
        ]
    )


def _gathered(r: dict[str, Any]) -> list[str]:
    g = r["gathers"]
    if g is None:
        return []
    warning = " **A gather is larger than that.**" if g["parameter_sized_outside"] else ""
    return [
        f"Weights are gathered layer by layer: a layer has {g['layer_bytes'] / GB:.3g} GB in the compute type, the "
        f"largest gather inside the layers' loop {g['largest_in_layers'] / GB:.3g} GB, outside of it "
        f"{g['largest_outside'] / GB:.3g} GB (the embedding or the head has {g['embedding_bytes'] / GB:.3g} GB)."
        f"{warning}",
        "",
    ]


def write(r: dict[str, Any], folder: Path) -> None:
    """`<config>.json` and `<config>.md`."""
    (folder / f"{r['config']}.json").write_text(json.dumps(r, indent=1) + "\n")
    (folder / f"{r['config']}.md").write_text(markdown(r))
