"""Bad usage: one line on stderr and exit status 2; help and dry run without loading JAX."""

import dataclasses
import errno
import json
import os
import subprocess
import sys

import pytest
import yaml

from trace_jax import cli, config_io
from trace_jax.config import RunConfig


def bad(capsys, *argv):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("trace-jax: ") and err.count("\n") == 1, err
    return err


def test_unknown_command_and_option(capsys):
    assert "train" in bad(capsys, "trian")
    assert "--run-dir" in bad(capsys, "train", "--rundir", "x")
    assert "--grpo.steps" in bad(capsys, "train", "--grpo.setps", "1")
    assert "needs a value" in bad(capsys, "train", "--grpo.steps")
    assert "needs a value" in bad(capsys, "train", "--grpo.steps", "--json")
    assert "nonsense" in bad(capsys, "train", "nonsense")
    assert "--split" in bad(capsys, "eval", "--split", "holdout")
    assert "--index" in bad(capsys, "inspect", "--index", "first")
    assert "did you mean play?" in bad(capsys, "pley")


def test_bad_config(capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("grpo: {stps: 1}")
    assert "grpo.steps" in bad(capsys, "train", "--config", str(path))
    assert "no such config file" in bad(capsys, "train", "--config", str(tmp_path / "none.yaml"))
    assert "grpo.steps" in bad(capsys, "train", "--grpo.steps", "many")
    assert "max_length" in bad(capsys, "train", "--rollout.context", "4096")


@pytest.mark.parametrize("command", ["grpo", "eval", "export"])
def test_commands_on_a_run_need_one(capsys, tmp_path, command):
    assert "--run-dir" in bad(capsys, command)
    assert "no run in" in bad(capsys, command, "--run-dir", str(tmp_path / "none"))


def test_resume_needs_a_run(capsys, tmp_path):
    assert "--run-dir" in bad(capsys, "train", "--resume")
    assert "no run in" in bad(capsys, "train", "--resume", "--run-dir", str(tmp_path))


def test_dry_run_prints_the_resolved_run(capsys, tmp_path):
    argv = ["train", "--dry-run", "--json", "--grpo.steps=3", "--mesh.data", "-1", "--keep-checkpoints", "2"]
    assert cli.main([*argv, "--run-dir", str(tmp_path / "r")]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    resolved = yaml.safe_load("\n".join(text))
    assert (resolved["grpo"]["steps"], resolved["mesh"]["data"], resolved["keep_checkpoints"]) == (3, -1, 2)
    assert json.loads(last)["grpo.steps"] == 3
    assert not (tmp_path / "r").exists()


def test_dry_run_refuses_what_could_not_run(capsys):
    assert "does not cover" in bad(capsys, "train", "--dry-run", "--mesh.fsdp", "3")
    assert "`grpo.objective` dr_grpo" in bad(capsys, "train", "--dry-run", "--grpo.objective", "dr_grpo")


def test_commands_that_show_a_run_take_no_configuration(capsys, tmp_path):
    for command in ("report", "export"):
        assert "takes no --seed" in bad(capsys, command, "--run-dir", str(tmp_path), "--seed", "1")
        assert "takes no --config" in bad(capsys, command, "--run-dir", str(tmp_path), "--config", "x.yaml")


def test_the_run_of_a_report_may_be_named_in_two_ways(capsys, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    for path in (run, other):
        path.mkdir()
        (path / "config.yaml").write_text(config_io.dump(RunConfig()))
    for words in ([run], ["--run-dir", run], [run, "--run-dir", run]):
        assert cli.main(["report", *map(str, words)]) == 0
        assert capsys.readouterr().out.strip() == str(run / "report.html")
        (run / "report.html").unlink()
    assert cli.main(["report", str(run), "--compare", str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"report": str(run / "report.html")}
    assert "<title>run against other" in (run / "report.html").read_text()
    assert "which run?" in bad(capsys, "report")
    assert "with --compare" in bad(capsys, "report", str(run), "--run-dir", str(other))
    assert f"no run in {tmp_path}" in bad(capsys, "report", str(run), "--compare", str(tmp_path))
    search = dataclasses.replace(RunConfig().environment, name="search")
    (other / "config.yaml").write_text(config_io.dump(RunConfig().replace(environment=search)))
    assert "different environments" in bad(capsys, "report", str(run), "--compare", str(other))
    assert "number" in bad(capsys, "report", str(run), "--trajectories", "0")


def test_simulate_looks_at_its_target_first(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in bad(capsys, "simulate", "--out", str(tmp_path / "file"), "--data.train", "1000000")
    assert "not a directory" in bad(capsys, "simulate", "--out", str(tmp_path / "file" / "below"))


@pytest.mark.parametrize(
    ("error", "said", "unsaid"),
    [
        (
            OSError(errno.ENOSPC, "", "r/m.jsonl"),
            "r/m.jsonl: no space left on device; free some",
            "--resume",
        ),
        (OSError(errno.EACCES, "", "r/.lock"), "make it writable", "--resume"),
        (OSError(errno.ENAMETOOLONG, "", "x"), "choose another path", "--resume"),
        (MemoryError(), "out of memory: lower", "--resume"),
        (RuntimeError("RESOURCE_EXHAUSTED: 9 GiB"), "out of memory: lower", "--resume"),
    ],
)
def test_limits_of_the_machine_are_one_line(capsys, monkeypatch, error, said, unsaid):
    def fail(args, config):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "bench", fail)
    message = bad(capsys, "bench", "sim")
    assert said in message and unsaid not in message


def run(*argv, **kwargs):
    command = [sys.executable, "-m", "trace_jax.cli", *argv]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, **kwargs)


def test_output_that_cannot_be_written(tmp_path):
    with open("/dev/full", "w") as full:
        done = run("train", "--dry-run", stdout=full)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "standard output: no space left" in done.stderr
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shows = "c.COMMANDS['bench'] = lambda *_: print('\\u2581') or {}"
    code = f"import trace_jax.cli as c; {shows}; c.main(['bench', 'sim'])"
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "?\n"), done.stderr


def test_no_command_prints_help(capsys):
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"    {name} " in shown for name in ("simulate", "inspect", "play", "train", "bench"))


def test_importing_loads_no_extra_and_help_no_jax():
    code = (
        "import sys, trace_jax, trace_jax.cli as c\n"
        "try: c.main(['train', '--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "extra = set('jax torch transformers tokenizers huggingface_hub gguf matplotlib tensorboardX wandb'.split())\n"
        "extra &= set(sys.modules)\n"
        "assert not extra, extra\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
