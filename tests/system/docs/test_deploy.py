"""Files of deploy/: flags, routes, metrics and paths that they name exist."""

import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes.server_process import ROOT

from serving.cli.options import Options
from serving.http.access.auth import PROBE_PATHS
from serving.launch import read_options

DEPLOY = ROOT / "deploy"
MODEL = ROOT / "assets/tiny-moe"
PLACES = {"/models/adapters": MODEL / "adapters", "/models/base": MODEL}
PLACES |= {"/adapters": MODEL / "adapters", "/model": MODEL}
# Files whose flags, paths, routes or metrics a test below compares with the server's.
CHECKED = {
    "Dockerfile",
    "README.md",
    "compose.cuda.yaml",
    "compose.yaml",
    "grafana/dashboard.py",
    "grafana/lora-jax.json",
    "grafana/provisioning/dashboards/lora-jax.yaml",
    "grafana/provisioning/datasources/prometheus.yaml",
    "kubernetes/functions.knative.yaml",
    "kubernetes/gateway.yaml",
    "kubernetes/nodes.yaml",
    "kubernetes/objectives.yaml",
    "kubernetes/server.yaml",
    "nodes.sbatch",
    "prometheus.yml",
}


def test_every_file_is_checked():
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=DEPLOY, capture_output=True, text=True, check=False)
    if done.returncode:  # an archive without its history
        pytest.skip("no git here")
    assert set(done.stdout.split()) == CHECKED


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.fixture(scope="module")
def metrics() -> dict[str, set[str]]:
    """Every series of /metrics, with its labels."""
    found: dict[str, set[str]] = {}
    for line in load(ROOT / "docs/site/reference.py").metrics().splitlines()[2:]:
        name, kind, labels, _ = (cell.strip(" |") for cell in line.split(" | ", 3))
        named = set(re.findall(r"`(\w+)`", labels))
        found[name.strip("`")] = named
        if kind == "histogram":
            found[f"{name.strip('`')}_bucket"] = named | {"le"}
    return found


def test_the_dashboard_is_what_its_script_writes():
    written = json.loads((DEPLOY / "grafana/lora-jax.json").read_text())
    assert written == load(DEPLOY / "grafana/dashboard.py").dashboard()


def test_metrics_and_labels_of_the_dashboard_exist(metrics):
    board = json.loads((DEPLOY / "grafana/lora-jax.json").read_text())
    expressions = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    expressions += [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    series = [found for e in expressions for found in re.findall(r"([\w:]+)\{([^}]*)\}", e)]
    series += [(name, f'{label}=""') for e in expressions
               for name, label in re.findall(r"label_values\(([\w:]+), (\w+)\)", e)]  # fmt: skip
    assert len(series) > 50
    for name, labels in series:
        assert name in metrics, name
        wanted = set(re.findall(r"(\w+)=", labels)) - {"instance"}  # Prometheus adds it
        assert wanted <= metrics[name], (name, wanted)
    for expression in expressions:
        names = re.findall(r"([\w:]+)\{", expression)
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert set(group.split(", ")) <= metrics[names[0]], expression
    titles = [panel["title"] for panel in board["panels"]]
    assert len(set(titles)) == len(titles)
    assert sum("by adapter" in title for title in titles) == 3


def check_flags(command: list[str]) -> Options:
    """The launcher takes a container's arguments, with folders that exist here."""
    for there, here in PLACES.items():
        command = [re.sub(rf"(^|=){there}$", rf"\1{here}", word) for word in command]
    options = read_options(command, {"SERVING_API_KEY": "key"})
    assert options.engine.model == str(MODEL)
    return options


def commands_of(script: list[str], folder: Path, environ: dict[str, str]) -> list[list[str]]:
    """Run a script of nodes where programs only note what they are told; return those of python."""
    programs = {
        "python": 'printf "%s\\0" "$@" >>"$NOTED"; printf "\\n" >>"$NOTED"',
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    noted = folder / "noted"
    environ = environ | {"PATH": f"{folder}:{os.environ['PATH']}", "NOTED": str(noted)}
    subprocess.run(script, env=environ, check=True, timeout=60)
    return [line.split("\0")[:-1] for line in noted.read_text().splitlines()]


def test_a_job_of_slurm_starts_each_node_with_flags_as_they_are_given(tmp_path):
    given = ["--host", "0.0.0.0", "--override-generation-config", '{"temperature": 0.5}']
    script = ["bash", str(DEPLOY / "nodes.sbatch"), "/model", "/some where/secret", *given]
    environ = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]", "GPUS_PER_NODE": "2"}
    commands = commands_of(script, tmp_path, environ)
    assert [command[:2] for command in commands] == [["-m", "serving.launch"]] * 2
    for rank, command in enumerate(commands):
        options = check_flags(command[2:])
        cluster = options.cluster
        assert (cluster.nnodes, cluster.node_rank, cluster.master_addr) == (2, rank, "node7")
        assert cluster.nodes_secret_file == "/some where/secret"
        assert options.engine.tensor_parallel_size == 4
        assert options.engine.override_generation_config == {"temperature": 0.5}


def test_a_group_of_pods_is_an_instance_over_their_gpus(tmp_path):
    (group,) = documents("kubernetes/nodes.yaml")
    template = group["spec"]["leaderWorkerTemplate"]
    pod = template["workerTemplate"]["spec"]
    (container,) = pod["containers"]
    size, gpus = template["size"], int(container["resources"]["limits"]["nvidia.com/gpu"])
    environ = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "head.x"}
    (command,) = commands_of([*container["command"], *container["args"]], tmp_path, environ)
    assert command[:2] == ["-m", "serving.launch"]
    options = check_flags(command[2:])
    assert options.engine.tensor_parallel_size == size * gpus
    cluster = options.cluster
    assert (cluster.nnodes, cluster.node_rank, cluster.master_addr) == (size, 1, "head.x")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert cluster.nodes_secret_file == f"{mounts['secret']}/secret"
    assert mounts["model"] == "/model"
    # The secret is its owner's, root, and of the group of the image's user.
    (user,) = re.findall(r"useradd --uid (\d+)", (DEPLOY / "Dockerfile").read_text())
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user)


def test_commands_of_the_page_name_files_and_flags_that_exist():
    text = (DEPLOY / "README.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    lines += [shlex.split(line) for line in re.findall(r"`(kubectl [^`]+)`", text)]
    targets = re.findall(r" AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    checked = 0
    for words in lines:
        for flag, name in itertools.pairwise(words):
            if flag in ("-f", "--file"):
                assert (ROOT / name).is_file(), words
                checked += 1
            if flag == "--target":
                assert name in targets, words
        if words[:2] == ["docker", "run"]:
            image = next(n for n, word in enumerate(words) if word.startswith("lora-jax:"))
            assert words[image].removeprefix("lora-jax:") in targets
            check_flags(words[image + 1 :])
            checked += 1
    assert checked == 7, lines


def test_the_compose_files_start_the_server_and_mount_what_exists():
    (compose,), (cuda,) = documents("compose.yaml"), documents("compose.cuda.yaml")
    server = compose["services"]["server"]
    check_flags(server["command"])
    targets = re.findall(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    for service in (server, cuda["services"]["server"]):
        assert service["build"]["target"] in targets
    mounts = [m for service in compose["services"].values() for m in service["volumes"]]
    for mount in mounts:
        source = re.sub(r"^\$\{\w+:-([^}]*)\}", r"\1", mount).partition(":")[0]
        named = source in compose["volumes"]
        assert named or (DEPLOY / source).exists(), mount
    (scraped,) = documents("prometheus.yml")[0]["scrape_configs"]
    port = next(word for word in server["command"] if "--metrics-port" in word).partition("=")[2]
    assert scraped["static_configs"] == [{"targets": [f"server:{port}"]}]
    for name in ("datasources/prometheus.yaml", "dashboards/lora-jax.yaml"):
        assert documents(f"grafana/provisioning/{name}")[0]["apiVersion"] == 1


def copied_by(dockerfile: str) -> list[str]:
    lines = re.findall(r"^COPY (.+)$", dockerfile.replace("\\\n", " "), re.MULTILINE)
    return [word for line in lines for word in line.split()[:-1]]


def test_the_image_is_made_of_files_that_exist():
    text = (DEPLOY / "Dockerfile").read_text()
    copied = copied_by(text)
    assert {"pyproject.toml", "src", "serving"} <= set(copied)
    assert not [name for name in copied if not (ROOT / name).exists()]
    (path,) = re.findall(r"127\.0\.0\.1:8000(/\w+)", text)
    assert path in PROBE_PATHS


def test_the_package_of_the_image_builds_of_the_files_that_are_copied(tmp_path):
    """Before: the build hook stayed outside, and the image could not be built."""
    pytest.importorskip("hatchling", reason="the package is not built here")
    for name in copied_by((DEPLOY / "Dockerfile").read_text()):
        source, place = ROOT / name, tmp_path / Path(name).name
        if source.is_dir():
            shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, place)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("dist/*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    wanted = {"serving/launch.py", "serving/http/routes/page/index.html"}
    csrc = (ROOT / "src" / "cuda_backend" / "csrc").rglob("*.cu")
    wanted |= {file.relative_to(ROOT / "src").as_posix() for file in csrc}
    assert len(wanted) > 10
    assert wanted <= set(names)


def test_probes_ask_for_routes_that_need_no_key():
    deployment, policy = documents("kubernetes/server.yaml")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    check_flags(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]["httpGet"]
        assert probe["path"] in PROBE_PATHS
        assert probe["port"] in ports
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    labels = deployment["spec"]["selector"]["matchLabels"]
    assert labels.items() <= pod["metadata"]["labels"].items()
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    assert policy["spec"]["ingress"][0]["ports"] == [{"port": ports["http"]}]
    limit_s = read_options([str(MODEL)], {}).shutdown_timeout
    assert pod["spec"]["terminationGracePeriodSeconds"] > limit_s


# Of a pod, without features that a cluster's administrator enables; volumes of a claim are one.
KNATIVE_TAKES = {"containerConcurrency", "timeoutSeconds", "containers", "volumes"}


def test_knative_s_contract_port_probes_one_copy_and_time_to_end():
    """The port that Knative puts into PORT is the one that is listened on."""
    (service,) = documents("kubernetes/functions.knative.yaml")
    template = service["spec"]["template"]
    (container,) = template["spec"]["containers"]
    check_flags(container["args"])
    options = read_options([str(MODEL), *(a for a in container["args"] if "--port" in a)], {})
    (port,) = container["ports"]
    assert (port["name"], port["containerPort"]) == ("http1", options.port)
    for kind in ("readinessProbe", "livenessProbe"):
        probe = container[kind]["httpGet"]
        assert probe["path"] in PROBE_PATHS
        assert probe["port"] == options.port
    assert template["spec"]["timeoutSeconds"] > options.shutdown_timeout
    scales = template["metadata"]["annotations"]
    assert scales["autoscaling.knative.dev/min-scale"] == "0"
    assert scales["autoscaling.knative.dev/max-scale"] == "1"
    assert {*template["spec"]} <= KNATIVE_TAKES
    assert container["securityContext"]["runAsNonRoot"]
    # There is no startup probe: until the port is open, the liveness probe would end the container.
    ready, alive = container["readinessProbe"], container["livenessProbe"]
    assert alive["initialDelaySeconds"] >= ready["periodSeconds"] * ready["failureThreshold"]
    assert scales["serving.knative.dev/progress-deadline"] == "20m"
    assert alive["initialDelaySeconds"] < 20 * 60


def test_the_pool_holds_the_pods_and_objectives_belong_to_it():
    deployment = documents("kubernetes/server.yaml")[0]
    pool, route = documents("kubernetes/gateway.yaml")
    objectives = documents("kubernetes/objectives.yaml")
    assert (pool["apiVersion"], pool["kind"]) == ("inference.networking.k8s.io/v1", "InferencePool")
    assert pool["spec"]["selector"] == deployment["spec"]["selector"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert pool["spec"]["targetPorts"] == [{"number": container["ports"][0]["containerPort"]}]
    assert [one["kind"] for one in objectives] == ["InferenceObjective"] * 2
    group = pool["apiVersion"].partition("/")[0]
    for one in objectives:
        assert one["spec"]["poolRef"] == {"group": group, "name": pool["metadata"]["name"]}
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == pool["metadata"]["name"]
