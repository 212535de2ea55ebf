"""requirements.txt is a lock of what setup.cfg asks for: one version for each Python, with hashes."""

import configparser
import re

import pytest
import small_runs
import yaml
from packaging.requirements import Requirement

LOCK = (small_runs.ROOT / "requirements.txt").read_text()
PYTHONS = ("3.11", "3.12", "3.13")


def locked(python):
    """Name -> version of the packages that this Python installs on Linux."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    lines = re.findall(r"^([a-z0-9][^\s]*==[^\\\n]*?)\s*\\$", LOCK, re.MULTILINE)
    found = [Requirement(line) for line in lines]
    chosen = [each for each in found if not each.marker or each.marker.evaluate(environment)]
    versions = {each.name: str(each.specifier).removeprefix("==") for each in chosen}
    assert len(versions) == len(chosen), "a package twice"
    return versions


def asked():
    """The requirements of the package and of its tests."""
    setup = configparser.ConfigParser()
    setup.read(small_runs.ROOT / "setup.cfg")
    text = setup["options"]["install_requires"] + setup["options.extras_require"]["test"]
    return [Requirement(line) for line in text.splitlines() if line]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_a_version_of_everything_that_setup_cfg_allows(python):
    versions = {name.lower().replace("_", "-"): version for name, version in locked(python).items()}
    for requirement in asked():
        version = versions[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement}: {version}; run make lock"


def test_every_package_of_the_lock_has_hashes():
    names = re.findall(r"^[a-z0-9][^\s]*==", LOCK, re.MULTILINE)
    blocks = re.findall(
        r"^[a-z0-9][^\s]*==[^\n]*\\\n(?:    --hash=sha256:[0-9a-f]{64}[ \\]*\n)+", LOCK, re.MULTILINE
    )
    assert len(names) == len(blocks) > 90


def test_classifiers_and_the_workflow_name_the_pythons_of_the_lock():
    setup = (small_runs.ROOT / "setup.cfg").read_text()
    assert re.findall(r"Python :: (3\.\d+)$", setup, re.MULTILINE) == list(PYTHONS)
    workflow = yaml.safe_load((small_runs.ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == list(PYTHONS)
