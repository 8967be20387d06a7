"""Several processes as one job: what declares them, and the launchers, with stubs in the place of what they start. Runs
of real processes are in test_launch_processes.py."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from trace_jax import cli
from trace_jax.config import ConfigError
from trace_jax.recipes import distributed

LAUNCH = Path(__file__).parent.parent / "launch"
SCRIPTS = [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"]


@pytest.fixture
def local(monkeypatch):
    spec = importlib.util.spec_from_file_location("local", LAUNCH / "local.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own(count="4", index="1", address="host:1234"):
    return {"TRACE_JAX_PROCESSES": count, "TRACE_JAX_PROCESS": index, "TRACE_JAX_COORDINATOR": address}


# What declares several processes


SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}


@pytest.mark.parametrize(
    ("environment", "by"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),  # an allocation, but no step of srun
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        (own(count="1", index="0"), None),
        (own() | {"TRACE_JAX_DISTRIBUTED": "0"}, None),
        (own(), "TRACE_JAX_PROCESSES"),
        ({"TRACE_JAX_DISTRIBUTED": "1"}, "TRACE_JAX_DISTRIBUTED"),
        (SLURM, "Slurm"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, "a TPU slice"),
        ({"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "a"}, "a TPU slice"),
    ],
)
def test_what_declares_several_processes(environment, by):
    found = distributed.declared(environment)
    assert (found and found.by) == by


def test_own_variables_say_everything():
    assert distributed.declared(own()).arguments == {
        "coordinator_address": "host:1234",
        "num_processes": 4,
        "process_id": 1,
        "cluster_detection_method": "deactivate",
    }


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"TRACE_JAX_PROCESSES": "4"}, "TRACE_JAX_PROCESS is not set"),
        (own(index="4"), "counts from 0 to"),
        (own(count="four"), "'four': a number"),
        (own(address="host"), "host:port"),
        ({"TRACE_JAX_DISTRIBUTED": "yes"}, "0 .alone. or 1"),
    ],
)
def test_contradictions_are_refused(environment, words):
    with pytest.raises(ConfigError, match=words):
        distributed.declared(environment)


@pytest.mark.parametrize("command", ["export", "simulate", "capability", "report"])
def test_what_one_process_does_is_refused_to_several(monkeypatch, capsys, command):
    for name, value in own().items():
        monkeypatch.setenv(name, value)
    more = {"capability": ["contrast", "--run-dir", "x"], "simulate": ["--out", "x"]}
    assert cli.main([command, *more.get(command, ["--run-dir", "x"])]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"`{command}` works in one process, and TRACE_JAX_PROCESSES" in said


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({}, None),  # no GPU
        ({"SLURM_GPUS_ON_NODE": "8"}, [2, 3]),  # 4 tasks of a node
        ({"SLURM_GPUS_ON_NODE": "4"}, [1]),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0"}, list(range(8))),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "3"}, [0]),  # bound to its own by Slurm
        ({"SLURM_GPUS_ON_NODE": "8", "JAX_LOCAL_DEVICE_IDS": "5"}, None),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, [4, 5, 6, 7]),
    ],
)
def test_gpus_of_a_slurm_task(environment, devices):
    assert distributed.declared(SLURM | environment).arguments.get("local_device_ids") == devices


# launch/local.py


def stub(local, monkeypatch, tmp_path, program):
    """Processes that run `program` (its `args`: the command's) instead of trace-jax."""
    script = tmp_path / "stub.py"
    script.write_text(
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        f"here, index, args = Path({str(tmp_path)!r}), os.environ['TRACE_JAX_PROCESS'], sys.argv[1:]\n" + program
    )
    monkeypatch.setattr(local, "COMMAND", [sys.executable, str(script)])


def test_local_dry_run(local, capsys):
    argv = ["--processes", "2", "--devices-per-process", "3", "--restarts", "1", "--dry-run", "--", "grpo"]
    assert local.main([*argv, "--init", "runs/a", "--run-dir", "runs/b"]) == 0
    first, second, again = capsys.readouterr().out.splitlines()
    assert "TRACE_JAX_PROCESS=0 " in first and "TRACE_JAX_PROCESS=1 " in second
    assert "JAX_NUM_CPU_DEVICES=3 " in first and "trace_jax.cli grpo --init runs/a --run-dir runs/b" in first
    assert again.endswith("grpo --run-dir runs/b --resume")
    assert local.environment(1, local.parser().parse_args([*argv[:4], "--platform", "cuda"]), 5)[
        "JAX_LOCAL_DEVICE_IDS"
    ] == ("3,4,5")


@pytest.mark.parametrize(
    "argv", [["--processes", "2", "--", "export"], ["--processes", "2", "--restarts", "1", "train"]]
)
def test_local_refuses(local, argv):
    assert local.main(argv) == 2


def test_local_ends_the_others_and_goes_on(local, monkeypatch, tmp_path, capfd):
    """One dies, the rest hang: they are killed; the second attempt continues the run."""
    stub(
        local,
        monkeypatch,
        tmp_path,
        "(here / f'{index}.{len(list(here.glob(index + \".*\")))}').write_text(' '.join(args))\n"
        "if '--resume' in args: sys.exit(0)\n"
        "(here / 'config.yaml').write_text('')\n"
        "if index == '1': print('no room', file=sys.stderr); sys.exit(3)\n"
        "time.sleep(60)\n",
    )
    begun = time.monotonic()
    argv = ["--processes", "2", "--patience", "0.3", "--restarts", "2", "--", "grpo", "--init=a", "--run-dir"]
    assert local.main([*argv, str(tmp_path)]) == 0
    assert time.monotonic() - begun < 15
    assert (tmp_path / "0.0").read_text() == f"grpo --init=a --run-dir {tmp_path}"
    assert (tmp_path / "0.1").read_text() == f"grpo --run-dir {tmp_path} --resume"
    assert not (tmp_path / "0.2").exists()
    said = capfd.readouterr().err
    assert "[1] no room" in said and "process 1 ended: status 3" in said and "restart 1 of 2" in said


@pytest.mark.parametrize("code", [2, 3])
def test_local_gives_up(local, monkeypatch, tmp_path, code):
    """Bad input at once, any other failure after the restarts; the status is that of the process that failed."""
    stub(local, monkeypatch, tmp_path, f"(here / str(time.monotonic_ns())).touch(); sys.exit({code})\n")
    argv = ["--processes", "1", "--restarts", "1", "--", "train", "--run-dir", str(tmp_path)]
    assert local.main(argv) == code
    assert len([p for p in tmp_path.iterdir() if p.name.isdigit()]) == (1 if code == 2 else 2)


def test_local_passes_a_signal_on(local, monkeypatch, tmp_path):
    stub(
        local,
        monkeypatch,
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda *_: ((here / f'heard{index}').touch(), sys.exit(143)))\n"
        "(here / f'up{index}').touch()\ntime.sleep(60)\n",
    )
    runner = tmp_path / "runner.py"
    runner.write_text(
        f"import sys; sys.path.insert(0, {str(LAUNCH)!r}); import local\n"
        f"local.COMMAND = {local.COMMAND!r}\n"
        f"sys.exit(local.main(['--processes', '2', '--restarts', '3', '--', 'sft', '--run-dir', {str(tmp_path)!r}]))\n"
    )
    launcher = subprocess.Popen([sys.executable, str(runner)])
    try:
        wait_for(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists())
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(30) == 143
    finally:
        launcher.kill()
    assert (tmp_path / "heard0").exists() and (tmp_path / "heard1").exists()


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# The shell launchers


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_shell_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)


def bash(script, *argv, cwd=None, **environment):
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | environment
    return subprocess.run(
        ["bash", str(LAUNCH / script), *map(str, argv)], capture_output=True, text=True, env=env, cwd=cwd, timeout=60
    )


def test_worker_finds_buckets_and_continues_a_run(tmp_path):
    begin = ("--dry-run", "grpo", "--init", "gs://b/runs/a", "--run-dir=gs://b/runs/c", "--config", "gs://d/x.yaml")
    run = tmp_path / "b" / "runs" / "c"
    done = bash("worker.sh", *begin, TRACE_JAX_GCS=str(tmp_path))
    assert done.stdout == (
        f"JAX_COMPILATION_CACHE_DIR={tmp_path}/b/runs/.jax-cache trace-jax grpo --init {tmp_path}/b/runs/a "
        f"--run-dir={run} --config {tmp_path}/d/x.yaml\n"
    )
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    done = bash("worker.sh", *begin, TRACE_JAX_GCS=str(tmp_path))
    assert done.stdout.split(" trace-jax ")[1] == f"grpo --run-dir={run} --config {tmp_path}/d/x.yaml --resume\n"
    assert bash("worker.sh", "train", "--config", "x").returncode == 2  # no run directory
    assert bash("worker.sh", "export").returncode == 2


def programs(folder, **texts):
    """Programs that a script finds first; returns the PATH."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_slurm_tries_again_and_queues_itself_after_sigterm(tmp_path):
    log = tmp_path / "log"
    path = programs(
        tmp_path / "bin",
        srun=f'echo "srun $*" >> {log}; n=$(grep -c ^srun {log}); [[ $n -lt 2 ]] && exit 1\n'
        f'trap "echo stopped >> {log}; exit 143" TERM; touch {tmp_path}/up; while :; do sleep 0.1; done',
        squeue="echo RUNNING",
        scontrol=f'echo "scontrol $*" >> {log}',
    )
    env = os.environ | {"PATH": path, "SLURM_JOB_ID": "42", "SLURM_SUBMIT_DIR": str(LAUNCH.parent)}
    job = subprocess.Popen(["bash", LAUNCH / "slurm.sbatch", "train", "--run-dir", "r", "--name", "a b"], env=env)
    try:
        wait_for((tmp_path / "up").exists)
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 143
    finally:
        job.kill()
    srun = "srun --kill-on-bad-exit=1 --wait=60 bash launch/worker.sh train --run-dir r --name a b"
    assert log.read_text().splitlines() == [srun, srun, "stopped", "scontrol requeue 42"]
    dry = bash("slurm.sbatch", "--dry-run", "train", "--run-dir", "r", cwd=tmp_path)
    assert dry.stdout.splitlines()[0].startswith("srun ") and "trace-jax train --run-dir r" in dry.stdout


def test_tpu_vm_runs_everywhere_and_passes_sigterm_on(tmp_path):
    log, stop = tmp_path / "log", tmp_path / "stop"
    path = programs(
        tmp_path / "bin",
        gcloud=f'echo "$*" >> {log}\n'
        f"if [[ $* == *exec* ]]; then touch {tmp_path}/up; while [[ ! -e {stop} ]]; do sleep 0.1; done; exit 143; fi\n"
        f"[[ $* != *-TERM* ]] || touch {stop}",
    )
    flags = ["--name", "pod", "--zone", "z", "--project", "p", "--restarts", "2"]
    argv = [*flags, "--", "train", "--run-dir", "gs://b/runs/a", "--name", "a b"]
    job = subprocess.Popen(["bash", LAUNCH / "tpu_vm.sh", *argv], env=os.environ | {"PATH": path})
    try:
        wait_for((tmp_path / "up").exists)
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 143
    finally:
        job.kill()
        stop.touch()
    begun, stopped = log.read_text().splitlines()
    assert begun.startswith("compute tpus tpu-vm ssh pod --zone z --worker all --project p --command ")
    assert begun.endswith(r"bash launch/worker.sh train --run-dir gs://b/runs/a --name a\ b")
    assert "TRACE_JAX_DISTRIBUTED=1" in begun and "kill -TERM" in stopped
    dry = bash("tpu_vm.sh", *flags, "--dry-run", "--", "train", "--run-dir", "r")
    assert dry.returncode == 0 and dry.stdout.count("gcloud compute tpus") == 2
    assert bash("tpu_vm.sh", "--name", "pod").returncode == 2


def test_xpk_hands_its_flags_on():
    done = bash(
        "xpk.sh",
        *["--cluster", "c", "--workload", "w", "--image", "i", "--dry-run", "--", "train", "--run-dir", "gs://b/a"],
    )
    assert done.stdout.startswith("xpk workload create --cluster c --workload w --docker-image i --max-restarts 10 ")
    assert done.stdout.rstrip().endswith(r"--command exec\ bash\ launch/worker.sh\ train\ --run-dir\ gs://b/a")
    assert bash("xpk.sh", "--cluster", "c", "--", "export").returncode == 2


# Fields of a JobSet (v1alpha2) around the jobs in it, from its reference: https://jobset.sigs.k8s.io/docs/reference
JOBSET = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {
        *("replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend"),
        *("coordinator", "managedBy", "ttlSecondsAfterFinished"),
    },
    "spec.network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "spec.failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "spec.failurePolicy.rules.0": {"name", "action", "onJobFailureReasons", "targetReplicatedJobs"},
    "spec.replicatedJobs.0": {"name", "groupName", "template", "replicas", "dependsOn"},
}


def jobset():
    text = (LAUNCH / "gke_jobset.yaml").read_text()
    values = {"NAME": "run-a", "IMAGE": "registry/image:1", "BUCKET": "bkt", "CONFIG": "configs/x.yaml"}
    for name, value in values.items():
        text = text.replace(f"${{{name}}}", value)
    assert "${" not in text.split("apiVersion")[1]
    (job,) = list(yaml.safe_load_all(text))
    return job


def test_jobset_is_valid():
    """Every field exists where it stands; the jobs are valid for Kubernetes itself."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is in the extra `dev`")
    job = jobset()
    for place, known in JOBSET.items():
        node = job
        for key in filter(None, place.split(".")):
            node = node[int(key) if key.isdigit() else key]
        assert set(node) <= known, place
    template = {"apiVersion": "batch/v1", "kind": "Job", **job["spec"]["replicatedJobs"][0]["template"]}
    kubernetes.validate(template, "1.31", strict=True)
    template["spec"]["template"]["spec"]["restartPolicies"] = "Never"
    with pytest.raises(kubernetes.ValidationError, match="restartPolicies"):
        kubernetes.validate(template, "1.31", strict=True)


def test_jobset_has_what_a_slice_needs():
    job = jobset()
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job["spec"]["failurePolicy"]["maxRestarts"] > 0
    (replicated,) = job["spec"]["replicatedJobs"]
    batch = replicated["template"]["spec"]
    assert batch["parallelism"] == batch["completions"] and batch["backoffLimit"] == 0
    pod = batch["template"]["spec"]
    (container,) = pod["containers"]
    chips = np.prod([int(n) for n in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")])
    assert chips == batch["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    # Kubernetes takes a policy of exit codes only with pods that are not restarted
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 300
    assert batch["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == container["name"]
    assert {v["name"] for v in pod["volumes"]} == {m["name"] for m in container["volumeMounts"]}
    assert container["volumeMounts"][0]["mountPath"] == "/gcs/bkt"  # where worker.sh looks
    done = bash(*[Path(container["command"][1]).name, "--dry-run", *container["args"]])
    assert "trace-jax train --config configs/x.yaml --run-dir " in done.stdout
