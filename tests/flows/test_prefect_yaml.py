"""prefect.yaml: every key is one that Prefect knows and we mean, and every parameter fits its flow."""

import inspect
import json
from pathlib import Path

import pytest
import yaml
from prefect.cli.deploy._models import (
    ConcurrencyLimitSpec,
    DeploymentConfig,
    PrefectYamlModel,
    RawScheduleConfig,
    WorkPoolConfig,
)
from prefect.events import DeploymentEventTrigger
from prefect.flows import load_flow_from_entrypoint
from pydantic import BaseModel

FILE = Path(__file__).parents[2] / "prefect.yaml"
FREE = None
"""Stands for anything: parameters are checked by the flow's own model."""

ALLOWED = {
    "name": FREE,
    "definitions": {"work_pool": {"name": FREE}},
    "deployments": {
        "name": FREE,
        "description": FREE,
        "entrypoint": FREE,
        "enforce_parameter_schema": FREE,
        "parameters": {"params": FREE},
        "concurrency_limit": {"limit": FREE, "collision_strategy": FREE},
        "schedules": {"slug": FREE, "cron": FREE, "timezone": FREE, "active": FREE},
        "triggers": {
            "name": FREE, "type": FREE, "enabled": FREE, "posture": FREE, "expect": FREE,
            "match": {"prefect.resource.id": FREE}, "for_each": FREE, "threshold": FREE, "within": FREE,
            "parameters": {"params": FREE},
        },
        "work_pool": {"name": FREE},
    },
}  # fmt: skip
MODELS: dict[str, type[BaseModel]] = {
    "": PrefectYamlModel,
    "deployments": DeploymentConfig,
    "deployments.concurrency_limit": ConcurrencyLimitSpec,
    "deployments.schedules": RawScheduleConfig,
    "deployments.triggers": DeploymentEventTrigger,
    "deployments.work_pool": WorkPoolConfig,
}
"""What Prefect itself reads at these paths."""

NOT_READ = {"definitions"}  # holds the YAML anchors


@pytest.fixture(scope="module")
def content():
    return yaml.safe_load(FILE.read_text())


@pytest.fixture(scope="module")
def deployments(content):
    return {deployment["name"]: deployment for deployment in content["deployments"]}


def unknown_keys(found, allowed, path=""):
    """Paths of all keys that ``allowed`` does not hold; lists are looked into item by item."""
    if allowed is FREE:
        return []
    if isinstance(found, list):
        return [key for number, item in enumerate(found) for key in unknown_keys(item, allowed, f"{path}[{number}]")]
    assert isinstance(found, dict), f"{path} is {found!r}"
    return [
        key
        for name, value in found.items()
        for key in (unknown_keys(value, allowed[name], f"{path}.{name}") if name in allowed else [f"{path}.{name}"])
    ]


def test_every_key_is_one_that_is_meant(content):
    assert unknown_keys(content, ALLOWED) == []


@pytest.mark.parametrize(
    ("number", "path", "old", "new"),
    [
        (2, (), "concurrency_limit", "concurency_limit"),
        (2, ("concurrency_limit",), "collision_strategy", "collision"),
        (2, ("schedules", 0), "timezone", "time_zone"),
        (3, ("triggers", 0), "expect", "expects"),
        (0, ("work_pool",), "name", "names"),
    ],
)
def test_a_misspelt_key_is_found_by_its_path(content, number, path, old, new):
    broken = json.loads(json.dumps(content))  # a copy in which no two share an anchor
    place = broken["deployments"][number]
    for step in path:
        place = place[step]
    place[new] = place.pop(old)
    found = [key for key in unknown_keys(broken, ALLOWED) if key.endswith(f".{new}")]
    assert [key.rpartition(".")[2] for key in found] == [new]
    assert found[0].startswith(f".deployments[{number}]")


@pytest.mark.parametrize("path", MODELS)
def test_prefect_reads_every_key_that_is_allowed(path):
    allowed = ALLOWED
    for step in path.split(".") if path else ():
        allowed = allowed[step]
    assert allowed.keys() - NOT_READ <= MODELS[path].model_fields.keys()


def parameters_model(deployment) -> type[BaseModel]:
    flow = load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)
    (parameter,) = inspect.signature(flow.fn).parameters.values()
    assert parameter.name == "params"
    return parameter.annotation


def test_the_four_deployments_are_of_the_right_flows(content):
    found = {
        (load_flow_from_entrypoint(deployment["entrypoint"]).name, deployment["name"])
        for deployment in content["deployments"]
    }
    assert found == {
        ("checkpoint-pipeline", "tiny"),
        ("checkpoint-pipeline", "deepseek-v3"),
        ("reconvert", "nightly"),
        ("evaluate", "on-new-checkpoint"),
    }


@pytest.mark.parametrize("name", ["tiny", "deepseek-v3", "nightly"])
def test_default_parameters_are_the_flows(deployments, name):
    given = deployments[name]["parameters"]["params"]
    params = parameters_model(deployments[name])(**given)
    assert params.model_dump(include=set(given), mode="json") == given
    assert deployments[name]["enforce_parameter_schema"] is True


def test_the_evaluation_takes_its_checkpoint_from_the_event(deployments):
    (trigger,) = deployments["on-new-checkpoint"]["triggers"]
    given = trigger["parameters"]["params"]
    assert given == {"checkpoint": "{{ event.payload.checkpoint }}", "gpu_limit": "gpu"}
    parameters_model(deployments["on-new-checkpoint"])(**given | {"checkpoint": "/data/checkpoints/some"})
    parsed = DeploymentEventTrigger(**trigger)
    assert parsed.match.matches({"prefect.resource.id": "shardflow://checkpoint/data/some%20where"})
    assert not parsed.match.matches({"prefect.resource.id": "shardflow://evaluation/data/some"})


def test_the_large_ones_run_one_at_a_time_and_nightly_has_a_time(deployments):
    assert deployments["nightly"]["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert deployments["deepseek-v3"]["concurrency_limit"]["limit"] == 1
    (schedule,) = deployments["nightly"]["schedules"]
    assert RawScheduleConfig(**schedule).timezone == "Europe/Berlin"
    assert deployments["deepseek-v3"]["parameters"]["params"] == {
        "source": "deepseek-ai/DeepSeek-V3", "out": "/data/checkpoints/DeepSeek-V3-mp8-fp8", "mp": 8,
        "weights": "fp8", "gpu_limit": "gpu",
    }  # fmt: skip


def test_a_misspelt_parameter_is_refused_with_its_path(deployments):
    given = deployments["nightly"]["parameters"]["params"]
    with pytest.raises(ValueError, match=r"revisions\n.*Extra inputs"):
        parameters_model(deployments["nightly"])(**given, revisions="main")
