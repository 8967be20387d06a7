"""Pages replace earlier pages and nothing else."""

import os

import pytest

from trace_jax.config import ConfigError
from trace_jax.report.target import MARK, check_target, put


def test_an_earlier_page_is_replaced_and_nothing_else(tmp_path):
    page, script = tmp_path / "new" / "page.html", tmp_path / "run.sh"
    put(page, f"<head>{MARK}</head>one")
    put(page, f"<head>{MARK}</head>two")
    assert page.read_text().endswith("two")
    assert [p.name for p in page.parent.iterdir()] == ["page.html"]
    script.write_text("echo mine")
    with pytest.raises(ConfigError, match="is no page of trace-jax: choose another file"):
        put(script, "page")
    assert script.read_text() == "echo mine"
    put(script, "page", ours=True)  # the place of a run's own report
    assert script.read_text() == "page"


def test_devices_and_directories_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no page of trace-jax"):
        check_target(tmp_path.__class__(os.devnull))
    with pytest.raises(ConfigError, match="is no page of trace-jax"):
        check_target(tmp_path.__class__(os.devnull), ours=True)
    with pytest.raises(ConfigError, match="is a directory: name a file"):
        check_target(tmp_path)
