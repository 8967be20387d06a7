"""`trace-jax export`: where it may write, what it refuses to write, and a full disk; the same of `import`."""

import dataclasses
import shutil

import numpy as np
import pytest
from test_recipes_import import CFG, CHAT, drawn, ran, refused

from trace_jax.config import ConfigError
from trace_jax.policy import hf, hf_files, hf_peft
from trace_jax.recipes import adoption
from trace_jax.recipes.rundir import RunDirectory


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint as others write them: without our mark."""
    directory = tmp_path_factory.mktemp("source") / "Tiny-1.0"
    hf.export(directory, drawn(CFG, CFG.vocab_size), CHAT)
    path = directory / hf.WEIGHTS
    path.write_bytes(path.read_bytes().replace(b'"producer":"trace-jax"', b'"producer":"somebody!"'))
    assert not hf_files.is_ours(path)
    return directory


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    from trace_jax import cli

    path = tmp_path_factory.mktemp("runs") / "run"
    assert cli.main(["import", "--from", str(source), "--run-dir", str(path)]) == 0
    return path


def files(directory) -> dict:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


@pytest.mark.parametrize("kept", [None, "config.json", "tokenizer.json"])
def test_a_checkpoint_of_others_is_not_overwritten(kept, source, run, tmp_path, capsys):
    """The whole checkpoint that was imported, or one file of it."""
    out = tmp_path / "theirs"
    shutil.copytree(source, out)
    for path in out.iterdir():
        if kept not in (None, path.name):
            path.unlink()
    before = files(out)
    told = refused(capsys, "export", "--run-dir", run, "--out", out)
    assert f"--out {out} holds a checkpoint that was not exported here" in told
    assert files(out) == before
    assert f"--run-dir {out}" not in told


def test_what_was_exported_here_is_replaced_whole(run, tmp_path, capsys):
    """Also the tokenizer of another policy, which readers would take before the new one."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    ran(capsys, "export", "--run-dir", run, "--out", out)
    wanted = files(out)
    for name in ("tokenizer.model", "vocab.json", "model-00001-of-00002.safetensors"):
        (out / name).write_bytes((out / hf.WEIGHTS).read_bytes())
    ran(capsys, "export", "--run-dir", run, "--out", out)
    assert files(out) == wanted and wanted["notes.txt"] == b"mine"
    # killed between its renames: the partial directory is the sign
    (out / hf.CONFIG).unlink()
    (out / hf.WEIGHTS).unlink()
    (out / hf.PARTIAL).mkdir()
    ran(capsys, "export", "--run-dir", run, "--out", out)
    assert files(out) == wanted


def test_a_run_and_the_other_kind_of_export_are_no_place(run, tmp_path, capsys):
    assert "is a run: choose another" in refused(capsys, "export", "--run-dir", run, "--out", run)
    out = tmp_path / "out"
    ran(capsys, "export", "--run-dir", run, "--out", out)
    words = ("export", "--run-dir", run, "--format", "peft", "--out")
    assert "holds a model, and adapters beside" in refused(capsys, *words, out)
    (out / hf.CONFIG).rename(out / hf_peft.CONFIG)
    (out / hf.WEIGHTS).rename(out / hf_peft.WEIGHTS)
    assert "holds adapters, and a model beside" in refused(capsys, "export", "--run-dir", run, "--out", out)
    assert "no adapters" in refused(capsys, *words, out)
    assert "--shard-size does not go with --format peft" in refused(capsys, *words, out, "--shard-size", "5GB")


@pytest.mark.parametrize("size", ["0", "-1", "lots", "1e3", "0.0000000001", "9" * 400, ""])
def test_sizes_of_files_that_are_none_are_refused_with_an_example(size, run, capsys):
    assert "give one such as 500MB" in refused(capsys, "export", "--run-dir", run, f"--shard-size={size}")


def test_huge_sizes_of_files_mean_one_file(run, tmp_path, capsys):
    ran(capsys, "export", "--run-dir", run, "--out", tmp_path / "out", "--shard-size", "999999TB")
    assert (tmp_path / "out" / hf.WEIGHTS).exists()


@pytest.mark.parametrize(
    ("value", "dtype", "word"),
    [(1e5, "float16", "in F16 .* use --dtype bfloat16"), (np.nan, None, "in F32 has NaN"), (1e5, None, None)],
)
def test_numbers_that_a_type_cannot_hold_are_refused(value, dtype, word, tmp_path):
    norm = np.ones(CFG.width)
    norm[3] = value
    model = drawn(CFG, CFG.vocab_size, final_norm=norm)
    if word is None:
        hf.export(tmp_path / "out", model, CHAT, dtype=dtype)
        return
    with pytest.raises(ConfigError, match=f"export: norm.weight {word}"):
        hf.export(tmp_path / "out", model, CHAT, dtype=dtype)
    assert not list((tmp_path / "out").iterdir())


def test_a_disk_that_is_too_small_is_found_out_first(source, run, tmp_path, capsys, monkeypatch):
    """Nothing is read or written, what was there stays."""
    out = tmp_path / "out"
    ran(capsys, "export", "--run-dir", run, "--out", out)
    before = files(out)
    monkeypatch.setattr(hf_files, "write", lambda *_: pytest.fail("written"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**16}))
    assert "MiB needed, 0 MiB free" in refused(capsys, "export", "--run-dir", run, "--out", out)
    assert files(out) == before
    assert "no space in" in refused(capsys, "import", "--from", source, "--run-dir", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_import_that_was_killed_leaves_nothing_of_its_own_to_the_next(source, tmp_path, capsys):
    """What is left is a base policy without a configuration; another tokenizer beside it is not the new one."""
    new = tmp_path / "run"
    ran(capsys, "import", "--from", source, "--run-dir", new)
    (new / "config.yaml").unlink()
    (new / "tokenizer.model").write_bytes(b"of another policy")
    ran(capsys, "import", "--from", source, "--run-dir", new)
    assert not (new / "tokenizer.model").exists()
    ran(capsys, "export", "--run-dir", new, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda d: d / "model.safetensors", "give the directory that it is in"),
        (lambda d: (d / "adapter_config.json").write_text("{}") and d, "these are adapters; merge them"),
        (lambda d: (d / "config.yaml").write_text("a: 1") and d, "it is a run; give what `trace-jax export` writes"),
        (lambda d: (d / "x.gguf").write_text("GGUF") and d, "give the file, .*x.gguf"),
        (lambda d: d, "it has no config.json"),
    ],
)
def test_paths_that_are_no_checkpoint_say_what_to_give(make, word, tmp_path, capsys):
    import re

    (tmp_path / "model.safetensors").write_bytes(b"")
    told = refused(capsys, "import", "--from", make(tmp_path), "--run-dir", tmp_path / "run")
    assert re.search(word, told), told


def test_what_an_imported_run_can_do_next_is_said(run, tmp_path, capsys):
    """It can be scored as it is; its tokenizer does not depend on the fields of training one, its shape is fixed."""
    assert "or score the imported policy by --agent untrained" in refused(capsys, "eval", "--run-dir", run)
    config = RunDirectory.open(run, lock=False).config
    other = dataclasses.replace(config, tokenizer=dataclasses.replace(config.tokenizer, transcripts=96))
    assert adoption.check(run, other).stages == {"base": "base"}
    other = dataclasses.replace(config, policy=dataclasses.replace(config.policy, rope_theta=5.0))
    with pytest.raises(ConfigError, match="`policy.rope_theta` is 5.0, but --init takes the policy of"):
        adoption.check(run, other)


def test_the_directory_of_a_checkpoint_is_no_run(source, capsys):
    before = files(source)
    assert "holds a checkpoint" in refused(capsys, "import", "--from", source, "--run-dir", source)
    assert files(source) == before
