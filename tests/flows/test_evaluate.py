"""The flow on a real (temporary) Prefect server: evidence in the file and in the artifact, failed where it must."""

import json
import sys

import pytest
from pydantic import ValidationError

from flows import cli
from flows.evaluate import EvaluateParameters, evaluate
from model.checkpoint.convert import convert
from model.errors import InputError, RunError
from model.evaluation.record import evidence_of
from tests.prefect_server import artifacts


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluate") / "tiny-mp2"
    convert(tiny, out, mp=2, weights="bf16")
    return out


def test_the_verb(tiny, tmp_path, monkeypatch, capsys):
    """``shardflow evaluate``: the evidence on standard output and in the directory, status 1 below a threshold."""
    convert(tiny, tmp_path / "mp1", mp=1, weights="bf16")
    few = ["--device", "cpu", "--max-tokens", "60", "--window", "32"]
    for limit, status in (("1000", 0), ("2", 1)):
        command = ["shardflow", "evaluate", str(tmp_path / "mp1"), *few, "--max-perplexity", limit]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = json.loads(capsys.readouterr().out)
        assert (ended.value.code, printed["passed"]) == (status, status == 0)
        assert printed == json.loads((tmp_path / "mp1" / "evaluation.json").read_text())
        assert "<svg" in (tmp_path / "mp1" / "evaluation.html").read_text()


@pytest.mark.usefixtures("prefect_server")
def test_a_checkpoint_alone_is_enough(checkpoint):
    """As the trigger starts it."""
    result = evaluate(params={"checkpoint": str(checkpoint)})
    assert result.perplexity.nats_per_token == pytest.approx(3.47, abs=0.05)
    assert result.compute.mp == 2
    evidence = evidence_of(checkpoint)
    assert (evidence.state, evidence.evaluation) == ("passed", result)
    page = artifacts("evaluation")[0]["data"]
    assert f"| nats a token | {result.perplexity.nats_per_token:.5f} |" in page
    assert "](data:image/png;base64,iVBOR" in page


@pytest.mark.usefixtures("prefect_server")
def test_a_failed_threshold_fails_the_run_and_is_written_down(checkpoint):
    params = EvaluateParameters(checkpoint=checkpoint, max_tokens=60, window=32, max_perplexity=2)
    with pytest.raises(RunError, match=r"evaluation.json: max_perplexity: [\d.]+ is above the limit of 2"):
        evaluate(params)
    assert evidence_of(checkpoint).state == "failed"
    page = artifacts("evaluation")[0]["data"]
    assert "**Failed.** max_perplexity" in page
    assert "| max_perplexity | 2 |" in page


@pytest.mark.usefixtures("prefect_server")
def test_agreement_with_the_source(checkpoint, tiny):
    params = EvaluateParameters(
        checkpoint=checkpoint, max_tokens=60, window=32, against=tiny, max_kl=1e-6, speed=(1, 3)
    )
    result = evaluate(params)
    assert [speed.batch for speed in result.run.speed] == [1, 3]
    assert result.agreement.tokens == 60
    assert result.agreement.mean_kl < 1e-9
    page = artifacts("evaluation")[0]["data"]
    assert "| reference | tiny-v3 (transformers, float32) |" in page
    assert "| max_kl | 1e-06 |" in page


def test_a_threshold_of_agreement_needs_a_reference():
    with pytest.raises(ValidationError, match=r"--min-agreement: needs a reference to agree with; give --against"):
        EvaluateParameters(checkpoint="out", min_agreement=0.9)


@pytest.mark.usefixtures("prefect_server")
def test_the_command_s_own_refusal_reaches_the_flow(checkpoint):
    with pytest.raises(InputError, match="window 513: takes 2 to 512 tokens"):
        evaluate(EvaluateParameters(checkpoint=checkpoint, window=513))


@pytest.mark.usefixtures("prefect_server")
def test_the_time_limit_is_hard(checkpoint):
    with pytest.raises(RunError, match=r"the 2 ranks were not done after 0.2 s"):
        evaluate(EvaluateParameters(checkpoint=checkpoint, timeout_s=0.2))


@pytest.mark.usefixtures("prefect_server")
def test_a_limit_that_does_not_exist_is_an_error(checkpoint):
    with pytest.raises(Exception, match="no-such-limit"):
        evaluate(EvaluateParameters(checkpoint=checkpoint, max_tokens=60, gpu_limit="no-such-limit"))


@pytest.mark.parametrize(
    "change", [{"window": 1}, {"batch": 0}, {"max_perplexity": 0.5}, {"timeout_s": 0}, {"surprise": 1}]
)
def test_a_wrong_parameter_is_refused_by_its_path(change):
    with pytest.raises(ValidationError) as caught:
        EvaluateParameters(**{"checkpoint": "out"} | change)
    assert [".".join(map(str, error["loc"])) for error in caught.value.errors()] == list(change)


def test_the_form_has_types_bounds_and_descriptions():
    schema = EvaluateParameters.model_json_schema()
    assert all("description" in field for field in schema["properties"].values())
    assert schema["required"] == ["checkpoint"]
    assert json.dumps(schema["properties"]["batch"]).count("minimum") == 1
