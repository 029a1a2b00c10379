"""The files around the package: configurations load, scripts are sound, the lock fits what it locks, and no test is skipped unseen."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from otb_megatron.config import load

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SHELL_SCRIPTS = [ROOT / ".ci/run", *sorted((ROOT / "tools").glob("*.sh")), *sorted((ROOT / "launch").iterdir())]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_loads(path: Path) -> None:
    config = load(path)
    # A quarter of the groups' names is enough to find a file: model_task_algorithm_hardware.
    assert len(path.stem.split("_")) >= 4, "name it model_task_algorithm_hardware"
    assert config.parallel.model_parallel_size >= 1
    assert path.read_text().startswith("#"), "say first what the run is and what it was run on"


def test_the_quickstart_has_its_configurations() -> None:
    assert {"qwen3_tiny_sums_sft_cpu", "qwen3_tiny_sums_otb_cpu"} <= {path.stem for path in CONFIGS}


def test_shell_scripts_are_clean() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run([shellcheck, *SHELL_SCRIPTS], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_script_can_be_started(path: Path) -> None:
    assert path.stat().st_mode & 0o111 and path.read_text().startswith("#!"), "make it executable and name its shell"


def _locked() -> dict[str, str]:
    lines = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def _wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(line) for line in [*project["dependencies"], *extras["cpu"], *extras["dev"]]]


def test_the_lock_pins_every_package_to_a_version_that_is_wanted() -> None:
    locked = _locked()
    outdated = [str(r) for r in _wanted() if re.sub(r"[-_.]+", "-", r.name).lower() not in locked or not r.specifier.contains(locked[r.name.lower()])]
    assert not outdated, f"run `make lock`: requirements/cpu.txt does not give {', '.join(outdated)}"


def test_what_the_overrides_leave_out_is_not_locked() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec"} & _locked().keys()


def test_files_name_no_machine_and_no_index() -> None:
    """Packages come from the index that the user's own pip or uv is set to."""
    places = [ROOT / "Makefile", ROOT / "pyproject.toml", *sorted((ROOT / "requirements").iterdir()), *SHELL_SCRIPTS, *sorted((ROOT / "docker").iterdir())]
    for path in places:
        found = re.search(r"index-url|/root/|/home/|/tmp/|simple/", path.read_text())
        assert not found, f"{path.name}: {found.group() if found else ''}"


def _pytest(directory: Path, source: str) -> subprocess.CompletedProcess[str]:
    (directory / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (directory / "test_sample.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, cwd=directory)


def test_a_skipped_test_fails(tmp_path: Path) -> None:
    result = _pytest(tmp_path, "import pytest\n\ndef test_it():\n    pytest.skip('no time')\n\n@pytest.mark.skip(reason='later')\ndef test_later():\n    pass\n")
    assert result.returncode == 1 and "2 failed" in result.stdout, result.stdout
    assert "no time" in result.stdout and "only tests marked `gpu` may be" in result.stdout


def test_a_skipped_file_fails(tmp_path: Path) -> None:
    result = _pytest(tmp_path, "import pytest\n\npytest.importorskip('no_such_library')\n\ndef test_it():\n    pass\n")
    assert result.returncode != 0 and "was skipped as a whole" in result.stdout, result.stdout


def test_gpu_tests_may_be_skipped_and_expected_failures_are_no_skips(tmp_path: Path) -> None:
    source = "import pytest\n\n@pytest.mark.gpu\ndef test_gpu():\n    pytest.skip('none here')\n\n@pytest.mark.xfail\ndef test_known():\n    assert False\n"
    result = _pytest(tmp_path, source)
    assert result.returncode == 0 and "1 skipped, 1 xfailed" in result.stdout, result.stdout


def _fake(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _find_python(path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / "tools/find_python.sh"], capture_output=True, text=True, env={"PATH": path, **environment})


def test_a_python_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    """As pyenv's shims of versions that are not active: the name is there, and running it fails."""
    broken, working = tmp_path / "broken", tmp_path / "working"
    broken.mkdir()
    working.mkdir()
    for name in ("python3.12", "python3", "python", "uv", "pyenv"):
        _fake(broken, name, "echo 'command not found' >&2; exit 127")
    (working / "python3").symlink_to(sys.executable)
    found = _find_python(f"{broken}:{working}:/usr/bin:/bin")
    assert found.returncode == 0, found.stderr
    version = subprocess.run([found.stdout.strip(), "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True)
    assert version.stdout.strip() == "(3, 12)"


def test_python_from_pyenv_and_from_uv(tmp_path: Path) -> None:
    versions = tmp_path / "root" / "versions" / "3.12.9" / "bin"
    versions.mkdir(parents=True)
    (versions / "python3.12").symlink_to(sys.executable)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("python3.12", "python3", "python"):
        _fake(tools, name, "exit 127")
    _fake(tools, "pyenv", f"echo {tmp_path / 'root'}")
    path = f"{tools}:/usr/bin:/bin"
    assert _find_python(path).returncode == 0
    _fake(tools, "pyenv", "exit 1")
    # uv: nothing found at first, then it installs one.
    _fake(tools, "uv", f'case "$1 $2" in "--version ") exit 0;; "python install") touch {tmp_path}/installed;; *) [ -e {tmp_path}/installed ] && echo {sys.executable};; esac')
    found = _find_python(path)
    assert found.returncode == 0 and "asking uv to install one" in found.stderr, found.stderr


def test_no_python_is_said_clearly(tmp_path: Path) -> None:
    for name in ("python3.12", "python3", "python", "uv", "pyenv"):
        _fake(tmp_path, name, "exit 127")
    found = _find_python(f"{tmp_path}:/bin")
    assert found.returncode == 1 and "no working Python 3.12 found" in found.stderr and not found.stdout
    wrong = _find_python("/usr/bin:/bin", PYTHON=str(tmp_path / "python3"))
    assert wrong.returncode == 1 and "is not a Python 3.12" in wrong.stderr
