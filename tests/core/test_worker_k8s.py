"""The Kubernetes Job that `agl worker --render-k8s` prints, held against the public schema of batch/v1.

The schema is what the official client was generated from: each of its models names its fields, their types, and (by raising)
what is required and which values are allowed. Where the client is not installed, only the settings are compared.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from agentlightning.cli import app
from agentlightning.cli.worker import Pods, Settings, job
from agentlightning.errors import ConfigError

PODS = Pods("registry.example/agents:1", 8, "train-sql", "agl-key")
SETTINGS = Settings("my.agents:solve", "https://store.example:4747", 4, "fit", True, 120.0)


def checked(value: Any, kind: str, client: Any, where: str = "$") -> Any:
    """`value` as the client's model; AssertionError for a field that `kind` does not have or a value of another type."""
    if match := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        assert isinstance(value, list), f"{where} is no list"
        return [checked(item, match[1], client, f"{where}[{i}]") for i, item in enumerate(value)]
    if match := re.fullmatch(r"[Dd]ict[\[(]str, (.+)[\])]", kind):
        assert isinstance(value, dict), f"{where} is no map"
        return {key: checked(item, match[1], client, f"{where}.{key}") for key, item in value.items()}
    plain = {"str": str, "int": int, "bool": bool}.get(kind)
    if plain is not None:
        assert type(value) is plain, f"{where} is no {kind}"
        return value
    model = getattr(client, kind)
    fields = {model.attribute_map[name]: name for name in model.openapi_types}
    assert set(value) <= set(fields), f"{where} has {set(value) - set(fields)}, which {kind} does not"
    given = {
        fields[key]: checked(item, model.openapi_types[fields[key]], client, f"{where}.{key}")
        for key, item in value.items()
    }
    return model(**given)  # raises ValueError for what is required and absent


@pytest.mark.parametrize("settings", [SETTINGS, Settings("a:b", "postgresql://agl@db/runs")])
@pytest.mark.parametrize("pods", [PODS, Pods("image")])
def test_it_is_a_job_of_the_public_schema(settings: Settings, pods: Pods) -> None:
    client = pytest.importorskip("kubernetes.client", reason="no Kubernetes client here: pip install kubernetes")
    made = checked(json.loads(json.dumps(job(settings, pods))), "V1Job", client)
    assert made.api_version == "batch/v1" and made.kind == "Job"
    assert client.ApiClient().sanitize_for_serialization(made) == job(settings, pods), "nothing was lost on the way"


@pytest.mark.parametrize("fault", ["unknown field", "wrong type", "missing"])
def test_the_check_finds_what_is_wrong(fault: str) -> None:
    client = pytest.importorskip("kubernetes.client", reason="no Kubernetes client here: pip install kubernetes")
    broken = job(SETTINGS, PODS)
    spec = broken["spec"]["template"]["spec"]
    if fault == "unknown field":
        spec["containers"][0]["arguments"] = []
    elif fault == "wrong type":
        spec["terminationGracePeriodSeconds"] = "30"
    else:
        del spec["containers"]
    with pytest.raises((AssertionError, ValueError)):
        checked(broken, "V1Job", client)


def test_pods_get_the_same_settings() -> None:
    """The arguments of a pod, read by the command itself, are the settings that the Job was rendered from."""
    made = job(SETTINGS, PODS)
    (container,) = made["spec"]["template"]["spec"]["containers"]
    again = CliRunner().invoke(app, [*container["args"], "--render-k8s", "--image", "i", "--key-secret", "agl-key"])
    (twice,) = json.loads(again.stdout)["spec"]["template"]["spec"]["containers"]
    assert (twice["args"], twice["command"], twice["env"]) == (container["args"], ["agl"], container["env"])
    assert made["spec"]["parallelism"] == 8 and "completions" not in made["spec"]
    assert made["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 120
    assert container["env"][0]["valueFrom"] == {"secretKeyRef": {"name": "agl-key", "key": "AGL_STORE_KEY"}}


@pytest.mark.parametrize(
    ("settings", "pods", "cure"),
    [
        (Settings("a:b", "sqlite:///runs.db"), PODS, "agl store serve"),
        (Settings("a:b", "postgresql://me:secret@db/runs"), PODS, "password"),
        (Settings("agents.py:solve", "http://store"), PODS, "module that the image has"),
        (Settings("a:b", "http://store"), Pods(""), "--image"),
        (Settings("a:b", "http://store"), Pods("i", name="No_Name"), "lower-case"),
    ],
)
def test_what_cannot_work_in_a_cluster_is_refused(settings: Settings, pods: Pods, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure) as told:
        job(settings, pods)
    assert "secret@" not in str(told.value)
