"""Runs that begin with another run's policy: whole or not at all, and refused where they could not go on."""

import errno
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from etils import epath
from recipes_helpers import CONFIG, compile_cache, finished_smoke, records, smoke

from trace_jax import cli, config_io
from trace_jax.config import ConfigError
from trace_jax.learner.checkpoint_files import MANIFEST, Folder
from trace_jax.recipes import adoption, train

__all__ = ["compile_cache", "finished_smoke", "smoke"]  # fixtures


def refused(capsys, *words):
    """The one line that a command ends with."""
    capsys.readouterr()
    assert cli.main([str(w) for w in words]) == 2
    error = capsys.readouterr().err
    line = [part for part in error.splitlines() if part.startswith("trace-jax:")]
    assert len(line) == 1 and "Traceback" not in error
    return line[0]


def test_a_copy_that_fails_leaves_no_run(finished_smoke, tmp_path, capsys, monkeypatch):
    """A full disk in the middle: one line; afterwards the same command begins the run."""
    source, target = finished_smoke[0], tmp_path / "new"
    copy, left = shutil.copyfile, iter(range(4))

    def full(a, b, **kwargs):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "full")
        return copy(a, b, **kwargs)

    argv = ["grpo", "--init", source, "--run-dir", target, "--grpo.steps", 0]
    with monkeypatch.context() as patch:
        patch.setattr(adoption.shutil, "copyfile", full)
        assert "no space left" in refused(capsys, *argv)
    assert not (target / "config.yaml").exists() and not list((target / "checkpoints" / "sft").glob("[0-9]*"))
    assert cli.main([str(w) for w in argv]) == 0
    assert "already holds a run" in refused(capsys, *argv)
    assert "already holds a run" in refused(capsys, *argv, "--dry-run")
    assert "leave one of them out" in refused(capsys, *argv, "--resume")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sft.epochs", 3], "`sft.epochs` is 3, but --init takes the policy of"),
        (["--policy.layers", 4], "`policy.layers` is 4, but --init takes"),
        (["--environment.name", "search"], "environment.name"),
    ],
)
def test_what_the_policy_was_made_with_stays(words, says, finished_smoke, tmp_path, capsys):
    argv = ["grpo", "--init", finished_smoke[0], "--run-dir", tmp_path / "new", *words]
    assert says in refused(capsys, *argv)
    assert says in refused(capsys, *argv, "--dry-run")
    assert not (tmp_path / "new" / "config.yaml").exists()


def test_a_source_that_is_damaged(smoke, tmp_path, capsys):
    source, _ = smoke
    argv = ["grpo", "--init", source, "--run-dir", tmp_path / "new"]
    tokenizer = source / "tokenizer.model"
    tokenizer.rename(tmp_path / "kept")
    assert "has no tokenizer.model: restore it" in refused(capsys, *argv)
    assert "is missing: restore it" in refused(capsys, "grpo", "--run-dir", source, "--resume", "--grpo.steps", 4)
    (tmp_path / "kept").rename(tokenizer)
    folder = max((source / "checkpoints" / "sft").glob("[0-9]*"))
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(bytes(content))
    assert "changed after it was written" in refused(capsys, *argv)
    assert "no run in" in (line := refused(capsys, "grpo", "--init", tmp_path / "nowhere")) and "--init" in line


def test_an_edited_manifest_is_no_checkpoint(smoke, capsys):
    """Of a field that nothing checks one by one, too; runs of earlier versions have no seal."""
    source, _ = smoke
    folder = Folder(epath.Path(source / "checkpoints" / "grpo"))
    newest = max(folder.complete())
    path = folder.path(newest) / MANIFEST
    manifest = json.loads(path.read_text())
    for change in ({"score": 10**400}, {"extra": manifest["extra"] | {"pending": {"5": {}}}}):
        path.write_text(json.dumps(manifest | change))
        assert newest not in folder.complete() and newest not in folder.by_score()
    path.write_text(json.dumps({k: v for k, v in manifest.items() if k != "seal"}))
    assert newest in folder.complete()


def test_an_edited_configuration_is_refused(smoke, capsys):
    source, _ = smoke
    text = (source / "config.yaml").read_text()
    steps = config_io.load(source / "config.yaml").grpo.steps
    assert len([r for r in records(source) if r["stage"] == "grpo"]) == steps
    (source / "config.yaml").write_text(text.replace(f"  steps: {steps}\n", f"  steps: {steps + 2}\n"))
    assert "was edited after training began" in refused(capsys, "grpo", "--run-dir", source, "--resume")


def test_key_value_heads_that_do_not_split(monkeypatch):
    config = config_io.load(CONFIG, [("mesh.tensor", "2"), ("policy.kv_heads", "1")])
    shape = {"data": 1, "fsdp": 1, "tensor": 2, "expert": 1}
    devices = np.array([type("Device", (), {"process_index": 0})() for _ in range(2)])
    mesh = SimpleNamespace(shape=shape, devices=devices, size=2)
    monkeypatch.setattr(train, "role_meshes", lambda config: (mesh, mesh))
    with pytest.raises(ConfigError, match=r"`mesh.tensor` \(2\) does not divide `policy.kv_heads` \(1\)"):
        train.check(config)


@pytest.mark.parametrize(
    "pairs",
    [
        [("grpo", "5"), ("grpo.steps", "3")],
        [("grpo.optimizer", "5"), ("grpo.optimizer.b1", ".9")],
        [("grpo.steps", "5"), ("grpo", "{group: 2}")],
    ],
)
def test_a_section_and_its_fields(pairs):
    with pytest.raises(ConfigError, match="give the section or its fields, not both"):
        config_io.parse_overrides(pairs)
