"""`trace-jax certify`: its numbers against closed forms, its files from a tiny run, its refusals."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from trace_jax import cli
from trace_jax.config import ConfigError, RunConfig
from trace_jax.recipes import certify
from trace_jax.report.panels import Panel, figure


def test_intervals_are_wilsons():
    """The textbook example: 8 of 10 gives 0.490 to 0.943; 10 of 10 stays below one sided certainty at 0.722."""
    some = certify.share(np.array([True] * 8 + [False] * 2))
    assert (round(some["low"], 3), round(some["high"], 3)) == (0.490, 0.943)
    full = certify.share(np.ones(10, bool))
    assert (round(full["low"], 3), full["high"]) == (0.722, 1.0)
    assert certify.share(np.zeros(0, bool))["value"] is None


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The presets and one more strength at the smallest size."""
    out = tmp_path_factory.mktemp("certificate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certify, "SWEEPS", {"strength": (0.5, 1.0)})
        result = certify.certify(RunConfig(), out, certify.SMALLEST)
    return out, result


def test_the_files_hold_what_was_measured(certificate):
    out, result = certificate
    stored = json.loads((out / "certificate.json").read_text())
    assert {k: v for k, v in result.items() if k != "out"} == stored
    note = (out / "certificate.md").read_text()
    head = stored["headline"]["ceiling_set"]
    assert f"{head['value']:.3f} ({head['low']:.3f}-{head['high']:.3f})" in note
    assert stored["date"] in note and f"seed {stored['seed']}" in note and stored["versions"]["jax"] in note
    assert str(out) not in note  # no paths of the machine
    for cells in re.findall(r"((?:^\|.*\n)+)", note, re.MULTILINE):
        assert len({line.count("|") for line in cells.splitlines()}) == 1


def test_every_proposal_is_accounted_for(certificate):
    _, result = certificate
    for preset in result["presets"].values():
        rows = preset["acceptance"]
        assert sum(row["proposals"] for row in rows) == result["proposals"]
        everything = next(row for row in preset["ceiling"] if row["section"] == "all")
        assert everything["accepted"] == sum(row["accepted"] for row in rows)
        for row in rows:  # one proposal may fail several checks, but none is rejected without a reason
            assert sum(row["failed"].values()) >= row["proposals"] - row["accepted"]
    paper = result["sweeps"]["strength"][1]
    assert {k: paper[k] for k in result["headline"]} == result["headline"]


def test_weaker_causes_are_accepted_less_often(certificate):
    _, result = certificate
    weak, paper = (row["acceptance"]["value"] for row in result["sweeps"]["strength"])
    easy, _, hard = (row["acceptance"]["value"] for row in result["sweeps"]["difficulty"])
    assert weak < paper and hard < easy


def test_the_figure_is_one_self_contained_file(certificate):
    out, result = certificate
    text = (out / "difficulty.svg").read_text()
    root = ElementTree.fromstring(text)
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text") if e.get("class") == "title"]
    assert len(titles) == len(result["sweeps"])
    assert "href" not in text and "url(" not in text


def test_points_are_drawn_to_scale_and_gaps_are_gaps():
    panel = Panel(
        title="a < b", label="x", ticks=(0.0, 1.0, 4.0), curves={"one": [(0.5, 0.4, 0.6), None, (1.0, 1.0, 1.0)]}
    )
    root = ElementTree.fromstring(figure([panel], "t"))
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    words = {e.text: float(e.get("x")) for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert len(dots) == 2 and dots[0][1] > dots[1][1]  # larger is higher
    assert (dots[0][0], dots[1][0]) == (words["0"], words["4"])
    ticks = [float(e.get("x")) for e in root.iter("{http://www.w3.org/2000/svg}text") if e.text == "1"]
    assert min(abs(x - (dots[0][0] + (dots[1][0] - dots[0][0]) / 4)) for x in ticks) < 0.1
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2  # the missing point cuts the curve


def test_what_it_cannot_do_is_one_line(tmp_path, capsys):
    with pytest.raises(ConfigError, match="--episodes 10"):
        certify.certify(RunConfig(), tmp_path, 10)
    assert cli.main(["certify", "--out", str(tmp_path), "--simulator.noise", "2"]) == 2
    assert "certify turns simulator.noise itself" in capsys.readouterr().err
