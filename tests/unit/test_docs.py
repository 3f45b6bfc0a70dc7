"""Options, commands, files and pages that docs/ names exist."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import typer
from typer.testing import CliRunner

import penstock
from pages import code
from penstock.algos.diagnostics import FIGURES, MOMENTS
from penstock.cli.app import app
from penstock.configs import option_aliases
from penstock.configs.keys import algorithms, is_section, options, sections
from penstock.configs.load import presets, resolve

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONS = {name for algo in algorithms() for name in options(algo)}
WRONG = {"learner.learning_rate", "algo.gamma"}  # in errors that pages quote
NUMBER = r"\d+(?:[.,]\d+)*"
FREE = ("env.kwargs", "algo.settings", "model.settings")  # keys below these are the user's


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "replay.md"], ids=lambda page: page.name
)  # the page on the library has variables of these names
def test_options_that_a_page_names_exist(page: Path) -> None:
    pattern = rf"(?<![\w/.-])(?:{'|'.join(sections())})(?:\.[a-z_]+)+(?![\w/(-]|\.\w)"
    prose = re.sub(r"```python\n.*?```", "", text_of(page), flags=re.DOTALL)
    found = {name for name in re.findall(pattern, prose) if not is_file(name)}
    known = {name for name in found if name in OPTIONS or is_section(name) or name.startswith(FREE)}
    known |= {name for name in found if name.removesuffix(".from") in OPTIONS}  # of a schedule
    if page.parent.name == "extending":  # options that the page's own code adds
        added = re.findall(r"^    (\w+): ", text_of(page), re.MULTILINE)
        known |= {name for name in found if name.rpartition(".")[2] in added}
    assert found - known - WRONG == set()


def rows_of_names() -> list[tuple[set[str], set[str]]]:
    """Of each row of options in coming-from.md: ours, and what others call them."""
    page = text_of(ROOT / "docs" / "coming-from.md").partition("## Options")[2]
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    found = []
    for ours, *theirs in rows:
        names = re.findall(r"--([a-z_-]+)|\b([a-z_]+)=", " ".join(theirs))
        others = {(flag or keyword).replace("-", "_") for flag, keyword in names}
        found.append((OPTIONS & set(re.findall(r"[a-z]+\.[a-z_]+", ours)), others))
    return [row for row in found if row[0]]


def test_page_and_errors_agree_on_option_names_of_other_libraries() -> None:
    tables = (option_aliases.ON_POLICY, option_aliases.OFF_POLICY)
    told = {name: {table[name] for table in tables if name in table} for name in tables[0]}
    rows = rows_of_names()
    assert len(rows) > 40
    for _, others in rows:
        for name in others & told.keys():
            same = [row for row, names in rows if name in names]
            named = set(re.findall(r"[a-z]+\.[a-z_]+", " ".join(told[name])))
            assert named & set().union(*same), name
    of_rows = set().union(*(others for _, others in rows))
    own_keys = {option.partition(".")[2] for option in OPTIONS}
    without_one_meaning = {"algo", "policy_kwargs", "optimizer_kwargs", "best_model_save_path"}
    assert of_rows - told.keys() - own_keys == without_one_meaning


def test_option_names_of_other_libraries_map_to_existing_options() -> None:
    here = {*option_aliases.ON_POLICY.values(), *option_aliases.OFF_POLICY.values()}
    assert set(re.findall(r"[a-z]+\.[a-z_]+", " ".join(here))) <= OPTIONS


def test_no_docstring_of_the_api_page_folds_a_parameter() -> None:
    """mkdocstrings makes a box, closed at first, of a line `name: text` above indented lines."""
    named = re.findall(r"^::: penstock\.(\S+)", text_of(ROOT / "docs" / "api.md"), re.MULTILINE)
    files = {ROOT / f"{'/'.join(name.split('.'))}.py" for name in named}
    files |= {ROOT / f"{'/'.join(name.split('.')[:-1])}.py" for name in named}
    box = re.compile(r"(?:^|\n\n)(?!Args|Returns|Yields|Raises)[\w-]+:(?: \S.*)?\n +\S")
    for file in filter(Path.exists, files):
        for node in ast.walk(ast.parse(text_of(file))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found = box.search(ast.get_docstring(node) or "")
                assert found is None, f"{file}: {found}"


def is_file(name: str) -> bool:
    return name.endswith((".py", ".md", ".yaml", ".json", ".key", ".key_secret"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    commands = set(getattr(typer.main.get_command(app), "commands"))  # noqa: B009
    named = set(re.findall(r"(?:^ {4,}|`|\$ +)penstock ([a-z][a-z-]*)\b", text_of(page), re.M))
    if page.parent.name == "extending":  # commands that the page's own code adds
        named -= set(re.findall(r'app\.command\("(\w+)"', text_of(page)))
    assert named - commands == set()


def commands_of(page: Path) -> list[list[str]]:
    """The lines of code that train or render a preset or a gymnasium id, in words."""
    text = re.sub(r"\\\n\s*", " ", text_of(page))
    lines = re.findall(
        r"^ {4,}(?:.*\$ +|torchrun .* -m |\S*/)?penstock ((?:train|learner|profile|render) .*)",
        text,
        re.MULTILINE,
    )
    found = [
        [word for word in shlex.split(line.partition(" > ")[0], comments=True) if word != "..."]
        for line in lines
    ]
    return [words for words in found if is_target(words[2 if words[0] == "render" else 1])]


def is_target(word: str) -> bool:
    return word in presets() or re.fullmatch(r"([\w]+/)?\w+-v\d+", word) is not None


EVERY_COMMAND = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)}")
    for page in PAGES
    if page.parent.name != "extending"  # with options that the page's own code adds
    for words in commands_of(page)
]


@pytest.mark.parametrize("words", EVERY_COMMAND)
def test_commands_of_a_page_are_accepted(words: list[str]) -> None:
    """Options by the parser of the command, and their combination by the checks of a config."""
    name, *rest = words
    if name == "render":
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.exception or result.output
        return
    command = getattr(typer.main.get_command(app), "commands")[name]  # noqa: B009
    given = command.make_context(name, rest).params
    overrides = list(given["overrides"] or [])
    overrides += [f"transport.bind={given['bind']}"] if given.get("bind") else []
    overrides += [f"learner.count={given['world']}"] if given.get("world") else []
    overrides += ["transport.insecure=true"] if given.get("insecure") else []
    resolve(given["target"], overrides)


def test_cluster_pages_have_commands() -> None:
    found = {page: len(commands_of(page)) for page in PAGES}
    assert found[ROOT / "README.md"] > 0
    assert found[ROOT / "docs" / "many-machines.md"] > 8


@pytest.mark.parametrize(
    "home",
    [
        "impala.algorithm",
        "ppo.algorithm",
        "pqn.algorithm",
        "dqn.update",
        "sac.update",
        "td3.update",
    ],
)
def test_every_statistic_of_an_algorithm_is_explained(home: str) -> None:
    module = import_module(f"penstock.algos.{home}")
    statistics = {*module.STATISTICS, *getattr(module, "MOMENTS", ())}
    if statistics & set(MOMENTS):
        statistics = statistics - set(MOMENTS) | set(FIGURES)
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in sorted(statistics) if f"`{name}`" not in page] == []


def test_the_reference_of_the_commands_is_up_to_date() -> None:
    command = re.search(
        r"^CLI_DOCS = TERM=dumb \$\(BIN\)/python (.*)$", text_of(ROOT / "Makefile"), re.M
    )
    assert command
    done = subprocess.run(
        [sys.executable, *command[1].split()], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.rstrip() + "\n" == text_of(ROOT / "docs" / "cli.md"), "run `make reference`"


PACKAGES = {path.name for path in (ROOT / "penstock").iterdir() if path.is_symlink()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:\w+/)+[\w.]+\.py)`", text_of(page)))
    ours = {name for name in named if name.partition("/")[0] in {*PACKAGES, "tests", "benchmarks"}}
    assert [name for name in sorted(ours) if not (ROOT / name).is_file()] == []


def test_documented_import_rule_equals_the_checked_one() -> None:
    settings = tomllib.loads(text_of(ROOT / "pyproject.toml"))["tool"]["importlinter"]
    layers = [re.findall(r"penstock\.(\w+)", row) for row in settings["contracts"][0]["layers"]]
    block = re.search(r"\n    cli\n(    .*\n)*", text_of(ROOT / "CONTRIBUTING.md"))
    chain = re.search(r"^    cli → .*$", text_of(ROOT / "docs" / "architecture.md"), re.M)
    assert block
    assert chain
    assert [re.findall(r"\w+", row) for row in block[0].strip().splitlines()] == layers
    assert re.findall(r"\w+", chain[0]) == [folder for row in layers for folder in row]


def test_readme_figures_equal_the_committed_results() -> None:
    section = text_of(ROOT / "README.md").partition("## How fast")[2].partition("\n## ")[0]
    numbers = set(re.findall(NUMBER, re.sub(r"<img .*?>", "", section)))
    results = set(re.findall(NUMBER, text_of(ROOT / "docs" / "results" / "README.md")))
    assert len(numbers) > 5
    assert numbers - results == set()


def test_the_replay_code_of_the_readme_runs() -> None:
    env = gymnasium.make_vec("CartPole-v1", num_envs=8)
    names = {
        "env": env,
        "policy": lambda _: env.action_space.sample(),
        "learn": lambda batch: batch.reward,
    }
    exec(code("../README.md", "python", 2).replace("10_000", "1_010"), names)
    batch: Any = names["batch"]
    assert batch.obs.shape == (256, 4)


def test_the_code_for_deploying_an_agent_runs_where_torch_is_missing() -> None:
    program = "import sys\nsys.modules['torch'] = None\n" + code("deploying.md", "python", 0)
    program += "print(action.shape, details.mean.shape, state)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stderr == ""
    assert done.stdout.endswith("(6,) (6,) None\n")


def test_the_code_that_explains_an_action_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    exec(code("python-api.md", "python", 5), {"penstock": penstock})
    printed = capsys.readouterr().out
    assert re.fullmatch(
        r"action \d with probability [01]\.\d\d\nreturn expected from here on: .+\n", printed
    )


def test_the_site_has_every_page_in_its_menu() -> None:
    menu = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert menu == pages


def test_the_site_needs_no_network() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    assert "http" not in settings
    assert "polyfills: [assets/iframe-worker.js]" in settings, "the offline plugin's is from a CDN"
    assert (ROOT / "docs" / "assets" / "iframe-worker.js").is_file()
