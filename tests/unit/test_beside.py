"""beside.py: what a vLLM beside the pinned one needs, and how a CUDA build runs on CPUs."""

from pathlib import Path

import beside
import pytest

ROOT = Path(__file__).parents[2]


def package(folder, name, version, requires=()):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    return info / "METADATA"


NEEDED = {
    "numpy": [],  # .venv has it
    "packaging>=999": ["packaging>=999"],  # .venv has an older one
    "no-such-package": ["no-such-package"],
    'no-such-package; python_version < "3"': [],
    'no-such-package[extra]==3; python_version > "3"': ["no-such-package==3"],
    'no-such-package; extra == "audio"': [],
    "torch==2.99": [],
    "torchaudio": [],
    "flashinfer-python==0.1": [],  # only the CUDA build needs it
    "helper>=2": [],  # beside, in that version
    "helper>=3": ["helper>=3"],
}


@pytest.mark.parametrize(("line", "wanted"), NEEDED.items())
def test_only_what_is_missing_or_of_another_version_is_installed(tmp_path, line, wanted):
    package(tmp_path, "vllm", "9.9", [line])
    package(tmp_path, "helper", "2.1")
    assert [str(requirement) for requirement in beside.unmet(tmp_path, "vllm")] == wanted


def test_what_the_needed_packages_need_is_installed_too(tmp_path, monkeypatch, capsys):
    """transformers of an older vLLM needs an older hub library than `.venv` has."""
    package(tmp_path, "vllm", "9.9", ["one-package", "lost-package"])
    index = {"one-package": ["two-package", "one-package"], "two-package": ["one-package"]}
    installed = []

    def pip_install(folder, requirement):
        installed.append(requirement)
        if requirement in index:
            package(folder, requirement, "1", index[requirement])
        return requirement in index

    monkeypatch.setattr(beside, "pip_install", pip_install)
    beside.install_needed(tmp_path, "vllm")
    assert sorted(installed) == ["lost-package", "one-package", "two-package"]
    assert "has no lost-package" in capsys.readouterr().out


def test_a_cuda_build_gets_the_kernels_of_the_pinned_cpu_build(tmp_path, monkeypatch):
    pinned, cuda = tmp_path / "pinned", tmp_path / "beside"
    for folder, names in ((pinned, ["_C.so"]), (cuda / "vllm" / "attention", ["fa.so", "a.py"])):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).touch()
    (cuda / "vllm" / "_C_cuda.so").touch()
    metadata = package(cuda, "vllm", "9.9", ["numpy"])
    monkeypatch.setattr(beside, "pinned_vllm", lambda: pinned)
    beside.make_cpu_build(cuda)
    assert sorted(path.name for path in cuda.rglob("*.so")) == ["_C.so"]
    assert (cuda / "vllm" / "_C.so").resolve() == pinned / "_C.so"
    assert (cuda / "vllm" / "attention" / "a.py").exists()
    assert "Version: 9.9+cpu\n" in metadata.read_text()


@pytest.mark.parametrize("version", ["..", ".", "", "nonsense", "/", "0.33.0/../.."])
def test_a_text_that_is_no_version_removes_nothing(tmp_path, monkeypatch, version):
    monkeypatch.setattr(beside, "FOLDER", tmp_path / "beside")
    (tmp_path / "kept").touch()
    with pytest.raises(beside.BesideError, match="is not a version of vLLM, such as"):
        beside.install(version)
    assert (tmp_path / "kept").exists()
