"""A survey of a repository: which framework it uses, and where that is said."""

from pathlib import Path

import pytest

from rlcanary.errors import UserError
from rlcanary.scaffold.functions import functions_by_capability
from rlcanary.scaffold.plan import Plan, local_source, own_requirement
from rlcanary.scaffold.survey import python_files, survey
from rlcanary.scaffold.templates import framework_adapter


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pyproject.toml", '[project]\nname = "mine"\ndependencies = ["TRL[vllm]>=1.16"]\n'),
        ("pyproject.toml", '[project]\nname = "mine"\noptional-dependencies = {train = ["trl"]}\n'),
        ("pyproject.toml", '[project]\nname = "trl"\n'),
        ("pyproject.toml", '[dependency-groups]\ntrain = ["trl ~= 1.16", {include-group = "dev"}]\n'),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntrl = "^1.16"\n'),
        ("requirements.txt", "torch\ntrl==1.16.0 # pinned\n"),
        ("requirements/train.txt", "trl @ git+https://example.org/trl\n"),
        ("setup.py", 'setup(name="mine", install_requires=["torch", "trl>=1"])\n'),
        ("environment.yml", "dependencies:\n  - pip:\n    - trl\n"),
        ("src/train.py", "def main():\n    from trl.trainer import GRPOTrainer\n"),
    ],
)
def test_framework_is_found_where_a_repository_says_it(tmp_path: Path, file: str, text: str) -> None:
    found = survey(write(tmp_path, {file: text}))
    assert found.frameworks == ["trl"]
    assert found.evidence["trl"] == [file]


def test_other_packages_and_comments_are_no_framework(tmp_path: Path) -> None:
    files = {
        "requirements.txt": "# trl\ntrl-tools\nmy.verl\n-r verl.txt\n",
        "pyproject.toml": '[project]\nname = "mine"\nkeywords = ["trl"]\n[tool.ruff]\nextend-exclude = ["verl"]\n',
        "train.py": "# import trl\nfrom trlx import train\ntext = 'import verl'\n",
        ".venv/lib/trainer.py": "import trl\n",
        "build/lib/train.py": "import verl\n",
    }
    assert survey(write(tmp_path, files)).evidence == {}


def test_named_dependency_comes_before_an_import(tmp_path: Path) -> None:
    files = {"a.py": "import trl\n", "b.py": "import trl\nimport ray\n", "requirements.txt": "verl\nvllm>=0.10\n"}
    found = survey(write(tmp_path, files))
    assert found.frameworks == ["verl", "trl"]
    assert found.evidence["ray"] == ["b.py"]
    assert found.evidence["vllm"] == ["requirements.txt"]


def test_skyrls_parts_are_skyrl(tmp_path: Path) -> None:
    assert survey(write(tmp_path, {"requirements.txt": "skyrl-train[vllm]\n"})).frameworks == ["skyrl"]


def test_existing_test_folder_takes_the_adapter(tmp_path: Path) -> None:
    found = survey(write(tmp_path, {"test/test_loss.py": ""}))
    assert Plan(found, None).adapter == "test/canary.py"


def test_unreadable_pyproject_is_a_mistake_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pyproject\.toml"):
        survey(write(tmp_path, {"pyproject.toml": "[project\n"}))


@pytest.mark.parametrize(
    ("origin", "requirement", "source"),
    [
        (None, "rlcanary[torch]", ""),
        ('{"url": "file:///home/me/rlcanary", "dir_info": {"editable": true}}', "rlcanary[torch]", "a folder"),
        ('{"url": "file:///r", "vcs_info": {"vcs": "git", "commit_id": "abc"}}', "rlcanary[torch]", "a git repository"),
        ('{"url": "file:///rlcanary-9-py3-none-any.whl", "archive_info": {}}', "rlcanary[torch]", "a file"),
        (
            '{"url": "https://example.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}',
            "rlcanary[torch] @ git+https://example.org/r.git@abc",
            "",
        ),
    ],
)
def test_workflow_installs_rlcanary_from_where_it_came(
    origin: str | None, requirement: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"METADATA": "Metadata-Version: 2.4\nName: rlcanary\nVersion: 9\n"}
    files |= {"direct_url.json": origin} if origin else {}
    write(tmp_path, {f"rlcanary-9.dist-info/{name}": text for name, text in files.items()})
    monkeypatch.syspath_prepend(tmp_path)
    assert (own_requirement(), local_source()) == (requirement, source)


def test_functions_are_found_by_the_words_that_trainers_use(tmp_path: Path) -> None:
    files = {
        "grpo.py": "def normalize_rewards_per_group(e): ...\ndef update_policy(m): ...\ndef show(x): ...\n",
        "losses/actor.py": "class GRPOLoss:\n    def __init__(self): ...\n\n    def forward(self, x): ...\n",
        "tests/test_loss.py": "def test_policy_loss(): ...\n",
        "broken.py": "def entropy(:\n",
    }
    root = write(tmp_path, files)
    found = functions_by_capability(root, python_files(root))
    assert {name: [str(each) for each in functions] for name, functions in found.items()} == {
        "advantages": ["normalize_rewards_per_group (grpo.py:1)"],
        "policy_loss": ["GRPOLoss.forward (losses/actor.py:4)"],
        "rl_step": ["update_policy (grpo.py:2)"],
    }


def test_ci_installs_the_dependencies_of_a_project_that_pip_cannot_build(tmp_path: Path) -> None:
    text = '[project]\nname = "mine"\nversion = "1"\ndependencies = ["torch>=2.6", "pandas"]\n'
    for built, told in (("", "'torch>=2.6' pandas"), ('[build-system]\nrequires = ["setuptools"]\n', "-e .")):
        root = write(tmp_path, {"pyproject.toml": text + built})
        workflow = next(file for file in Plan(survey(root), None).files() if file.path.endswith("rlcanary.yml"))
        assert workflow.text is not None
        assert f"pip install {told} " in workflow.text


def test_link_to_nothing_is_no_file_of_the_repository(tmp_path: Path) -> None:
    (tmp_path / ".#train.py").symlink_to("user@host.1")  # as an editor locks a file
    assert survey(write(tmp_path, {"train.py": "import trl\n"})).frameworks == ["trl"]


def test_name_with_quotes_is_a_name_in_the_adapter() -> None:
    namespace: dict[str, object] = {}
    exec(framework_adapter("trl", 'my "lab"').replace("(TrlAdapter)", ""), namespace)
    assert vars(namespace["Canary"])["name"] == 'my "lab"'
