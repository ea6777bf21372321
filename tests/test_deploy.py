"""The container file and the Kubernetes manifests: valid, and in agreement with the code."""

from __future__ import annotations

import copy
import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvstore import cli, config
from kvstore.store import health, server
from kvstore.units import GIB
from tests.harness.live import LiveStore, eventually
from tests.harness.pages import ROOT, text
from tests.test_docs import check_transfer_config
from tests.test_health import Port

DEPLOY = ROOT / "deploy"
SCHEMAS = json.loads((ROOT / "tests/data/kubernetes-1.36.json").read_text())
SPARE_BYTES = 4 * GIB  # of a store, beside its capacity


# The container file


@cache
def instructions() -> list[tuple[str, str]]:
    """Each instruction and its argument."""
    lines = re.sub(r"\\\n\s*", "", text("deploy/Containerfile")).splitlines()
    words = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in words]


def last(word: str) -> str:
    return [rest for found, rest in instructions() if found == word][-1]


def test_Q18_a_container_runs_the_store_as_a_user_of_its_own() -> None:
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN"}
    known |= {"USER", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in instructions()} == known
    program, *arguments = json.loads(last("ENTRYPOINT")) + json.loads(last("CMD"))
    assert program == "/opt/kvstore/bin/kvstore"
    assert cli._parser().parse_args(arguments).config == Path("/etc/kvstore/kvstore.toml")
    assert int(last("USER").partition(":")[0]) > 0
    assert last("STOPSIGNAL") == signal.SIGTERM.name
    words = [word for word, _ in instructions()]
    assert words.index("USER") < words.index("ENTRYPOINT")


def test_Q18_a_container_is_made_of_what_the_package_needs() -> None:
    project = tomllib.loads(text("pyproject.toml"))
    copied = {
        name
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for name in rest.split()[:-1]
    }
    packages = {
        name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    files = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert copied == packages | files
    assert {line[1:] for line in text(".dockerignore").splitlines() if line[0] == "!"} == copied
    tag = re.fullmatch(r"python:(\d\.\d+)-slim-\w+", last("FROM"))
    assert tag is not None
    assert f"Python :: {tag[1]}" in str(project["project"]["classifiers"])
    for name, value in [rest.split("=", 1) for word, rest in instructions() if word == "ARG"]:
        assert f"\n{name} ?= {value}\n" in text("Makefile")


def test_Q18_a_container_is_healthy_while_its_store_is(tmp_path: Path) -> None:
    _, _, words = last("HEALTHCHECK").partition("CMD ")
    _, flag, code = json.loads(words)
    default = config.parse({"cpu": {"capacity": "1GiB"}}).server.metrics
    assert default is not None
    assert f"http://{default.host}:{default.port}/healthz" in code
    port = Port()
    command = [sys.executable, flag, code.replace(f":{default.port}/", f":{port.number}/")]
    with LiveStore(port.settings(tmp_path)):
        eventually(port.ready)
        assert subprocess.run(command, check=False).returncode == 0
    assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 1


# Kubernetes


@cache
def manifests() -> dict[str, Any]:
    """Each object, by its kind."""
    found = {}
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for each in yaml.safe_load_all(path.read_text()):
            assert each["kind"] not in found
            found[each["kind"]] = each
    return found


def refuse(thing: Any) -> None:  # noqa: ANN401 - of YAML
    """Raise ValidationError for what Kubernetes would not take."""
    schema = {**SCHEMAS, "$ref": f"#/$defs/{thing['kind']}"}
    jsonschema.Draft202012Validator(schema).validate(thing)


def pod(kind: str) -> Any:  # noqa: ANN401 - of YAML
    spec = manifests()[kind]["spec"]
    return spec["template"]["spec"] if kind == "DaemonSet" else spec


def store_config() -> config.Config:
    return config.parse(tomllib.loads(manifests()["ConfigMap"]["data"]["kvstore.toml"]))


def mounts(kind: str) -> dict[str, dict[str, Any]]:
    """Each place in a pod's container, and the volume that is there."""
    volumes = {volume["name"]: volume for volume in pod(kind)["volumes"]}
    (container,) = pod(kind)["containers"]
    return {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}


@pytest.mark.parametrize("kind", ["ConfigMap", "DaemonSet", "Pod"])
def test_Q18_kubernetes_takes_each_manifest(kind: str) -> None:
    thing = manifests()[kind]
    refuse(thing)
    wrong = copy.deepcopy(thing)
    wrong["metadata"]["nam"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="'nam' was unexpected"):
        refuse(wrong)


def test_Q18_the_pod_of_a_store_has_all_that_its_configuration_names() -> None:
    found = store_config()
    (container,) = pod("DaemonSet")["containers"]
    places = mounts("DaemonSet")
    path = cli._parser().parse_args(container["args"]).config
    assert places[str(path.parent)]["configMap"]["name"] == "kvstore"
    assert path.name in manifests()["ConfigMap"]["data"]
    assert str(Path(found.server.socket).parent) in places
    assert found.nvme is not None
    assert found.nvme.path in places
    limit = container["resources"]["limits"]["memory"]
    assert limit == container["resources"]["requests"]["memory"]
    assert int(limit.removesuffix("Gi")) * GIB >= found.cpu.capacity_bytes + SPARE_BYTES
    assert pod("DaemonSet")["terminationGracePeriodSeconds"] >= server._FLUSH_LIMIT_S + 30
    assert f"{pod('DaemonSet')['securityContext']['runAsUser']}:" in last("USER")


def test_Q18_the_folders_of_a_store_are_made_for_its_user() -> None:
    user = pod("DaemonSet")["securityContext"]["runAsUser"]
    (made,) = pod("DaemonSet")["initContainers"]
    found = store_config()
    assert found.nvme is not None
    commands = [shlex.split(line) for line in made["args"][0].split("&&")]
    for folder, mode in (
        (str(Path(found.server.socket).parent), "0750"),
        (found.nvme.path, "0700"),
    ):
        owner = ["-o", str(user), "-g", str(found.server.group)]
        assert ["install", "-d", "-m", mode, *owner, folder] in commands
        assert folder in [each["mountPath"] for each in made["volumeMounts"]]


def test_Q18_probes_ask_for_what_a_store_answers(tmp_path: Path) -> None:
    (container,) = pod("DaemonSet")["containers"]
    address = store_config().server.metrics
    assert address is not None
    assert address.host == "0.0.0.0"  # noqa: S104 - of a pod: probes come from outside of it
    assert container["ports"] == [{"name": "metrics", "containerPort": address.port}]
    probes = {name: probe for name, probe in container.items() if name.endswith("Probe")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {
        "startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"
    }  # fmt: skip
    port = Port()
    with LiveStore(port.settings(tmp_path)):
        eventually(port.ready)
        assert {port.get(path)[0] for path in paths.values()} == {200}
    alive = probes["livenessProbe"]
    assert alive["periodSeconds"] * alive["failureThreshold"] > 2 * health.STILL_S


def test_Q18_the_pod_of_an_engine_reaches_the_store_and_is_let_in() -> None:
    found, engine = store_config(), pod("Pod")
    (container,) = engine["containers"]
    table = json.loads(container["args"][0])
    check_transfer_config(table)
    extra = table["kv_connector_extra_config"]
    assert extra["store"] == f"unix://{found.server.socket}"
    assert extra["store_user"] == pod("DaemonSet")["securityContext"]["runAsUser"]
    folder = str(Path(found.server.socket).parent)
    assert mounts("Pod")[folder] == mounts("DaemonSet")[folder]
    assert engine["securityContext"]["runAsUser"] in found.server.allow
    assert found.server.group in engine["securityContext"]["supplementalGroups"]
    assert found.server.mode == 0o660
    assert engine["nodeSelector"] == pod("DaemonSet")["nodeSelector"]
