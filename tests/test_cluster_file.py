"""cluster.yaml is what Ray's launcher accepts, and what it starts is there."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

import pytest
import yaml
from sourcetree import ROOT

from kvferry.core.config import load_config


@pytest.fixture(scope="module")
def launcher() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    return loaded


def test_ray_accepts_it(launcher: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(launcher)
    validate_config(prepared)
    (node_type,) = prepared["available_node_types"].values()
    assert node_type["min_workers"] == len(launcher["provider"]["worker_ips"])


def test_every_node_has_a_role(launcher: dict[str, Any]) -> None:
    lines = (ROOT / "deploy" / "roles.txt").read_text().splitlines()
    roles = dict(line.split() for line in lines if line and not line.startswith("#"))
    provider = launcher["provider"]
    assert roles.pop(provider["head_ip"]) == "head"
    assert set(roles) == set(provider["worker_ips"])
    assert set(roles.values()) == {"prefill", "decode"}


def test_the_commands_exist(launcher: dict[str, Any]) -> None:
    commands = launcher["head_start_ray_commands"] + launcher["worker_start_ray_commands"]
    scripts = re.findall(r"~/kvferry/(\S+)", " ".join(commands))
    assert scripts
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK), script
        subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_the_served_configuration_is_valid() -> None:
    config = load_config(ROOT / "deploy" / "serve.yaml")
    assert config.cluster.ray_address == "auto"
    # On nodes of their own, workers that listen on loopback reach nobody.
    assert config.prefill.host == config.decode.host == "node"


def test_a_node_without_a_role_is_told_so() -> None:
    done = subprocess.run(
        [ROOT / "deploy" / "start_node.sh", "worker", "192.0.2.10"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "has no line in deploy/roles.txt" in done.stderr
