"""The files around the package: configurations load, scripts are sound, the lock fits what it locks, and no test is skipped unseen."""

from __future__ import annotations

import os
import re
import shutil
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


SAMPLE = """
import pytest

def test_says_skip():
    pytest.skip("no time")

@pytest.mark.skip(reason="later")
def test_is_marked_skip():
    pass

@pytest.mark.gpu
def test_gpu():
    pytest.skip("no GPU")

@pytest.mark.xfail
def test_known_failure():
    assert False
"""


def test_a_skipped_test_or_file_fails_unless_it_is_marked_gpu(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "test_whole_file.py").write_text("import pytest\n\npytest.importorskip('no_such_library')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "."]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    output = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment).stdout
    assert "test_whole_file.py was skipped as a whole" in output
    assert "test_says_skip was skipped; only tests marked `gpu` may be" in output and "test_is_marked_skip was skipped" in output
    # A skip by mark is reported in the setup of its test, and so as an error, like the file's.
    assert "1 failed, 1 skipped, 1 xfailed, 2 errors" in output


def _fake(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _only_bash(directory: Path) -> Path:
    """A PATH of its own, so that what is installed on the machine does not matter."""
    directory.mkdir()
    bash = shutil.which("bash")
    assert bash
    (directory / "bash").symlink_to(bash)
    return directory


def _find_python(*path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": ":".join(map(str, path)), **environment}
    return subprocess.run([ROOT / "tools/find_python.sh"], capture_output=True, text=True, env=variables)


def test_a_python_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    """As pyenv's shims of versions that are not active: the name is there, and running it fails."""
    broken, working = _only_bash(tmp_path / "broken"), tmp_path / "working"
    for name in ("python3.12", "python3", "python", "uv", "pyenv"):
        _fake(broken, name, "echo 'command not found' >&2; exit 127")
    working.mkdir()
    (working / "python3").symlink_to(sys.executable)
    found = _find_python(broken, working)
    assert found.returncode == 0, found.stderr
    version = subprocess.run([found.stdout.strip(), "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True)
    assert version.stdout.strip() == "(3, 12)"


def test_python_from_pyenv(tmp_path: Path) -> None:
    versions = tmp_path / "root" / "versions" / "3.12.9" / "bin"
    versions.mkdir(parents=True)
    (versions / "python3.12").symlink_to(sys.executable)
    tools = _only_bash(tmp_path / "tools")
    _fake(tools, "python3.12", "exit 127")
    _fake(tools, "pyenv", f"echo {tmp_path / 'root'}")
    found = _find_python(tools)
    assert found.returncode == 0 and found.stdout.strip(), found.stderr


def test_python_from_uv(tmp_path: Path) -> None:
    """uv knows none at first, and is then asked to install one."""
    tools, installed = _only_bash(tmp_path / "tools"), tmp_path / "installed"
    answers = [f'"python install") : > {installed};;', f'"python find") [ -e {installed} ] && echo {sys.executable};;', '"--version ") ;;']
    _fake(tools, "uv", f'case "$1 $2" in {" ".join(answers)} esac')
    found = _find_python(tools)
    assert found.returncode == 0 and found.stdout.strip(), found.stderr
    assert "asking uv to install one" in found.stderr


def test_no_python_is_said_clearly(tmp_path: Path) -> None:
    tools = _only_bash(tmp_path / "tools")
    _fake(tools, "python3.12", "exit 127")
    # An interpreter that works and is of another version.
    _fake(tools, "python3", f"exec {sys.executable} -c 'import sys; sys.version_info = (3, 11, 7); exec(sys.argv[1])' \"$2\"")
    found = _find_python(tools)
    assert found.returncode == 1 and "no working Python 3.12 found" in found.stderr and not found.stdout
    named = _find_python(tools, PYTHON=str(tools / "python3"))
    assert named.returncode == 1 and "is not a Python 3.12" in named.stderr and not named.stdout
