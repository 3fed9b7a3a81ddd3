"""The size of this repository stays within `budget.toml` (CONTRIBUTING.md says how it may rise)."""

import re
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "budget.toml").is_file():
    pytest.skip("not a checkout", allow_module_level=True)
BUDGET = tomllib.loads((ROOT / "budget.toml").read_text(encoding="utf-8"))
SLACK = 0.03  # of a budget, which is to be lowered when so much of it is free


def sources(folder: str, pattern: str = "*.py") -> list[str]:
    skipped = r"\.|(build|dist|node_modules|demo|out)/"  # hidden folders, such as environments, among them
    paths = (ROOT / folder).rglob(pattern)
    names = {path: path.relative_to(ROOT).as_posix() for path in paths}
    return [path.read_text(encoding="utf-8") for path, name in names.items() if not re.match(skipped, name)]


def lines(folder: str) -> int:
    return sum(text.count("\n") for text in sources(folder))


def settings() -> int:
    """Fields of the configuration's sections."""
    from lolcats.config import LinearizeConfig

    found = 0
    for field in LinearizeConfig.model_fields.values():
        kind = field.annotation
        found += len(getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", {"": None}))
    return found


def flags() -> int:
    """Options of all commands, as `--help` shows them."""
    import typer.main

    from lolcats.cli.app import app

    def count(command: object) -> int:
        inner = getattr(command, "commands", {}).values()
        return sum(map(count, inner)) + sum(p.param_type_name == "option" for p in command.params)  # type: ignore[attr-defined]

    return count(typer.main.get_command(app))


def actual() -> dict[str, dict[str, int]]:
    src = sources("src/lolcats")
    return {
        "src": {"total": lines("src")}
        | {name: lines(f"src/lolcats/{name}") for name in BUDGET["src"] if name != "total"},
        "lines": {name: lines(name) for name in BUDGET["lines"]},
        "bytes": {"markdown": sum(len(text.encode()) for text in sources(".", "*.md"))},
        "count": {
            "settings": settings(),
            "flags": flags(),
            "kernels": sum(len(re.findall(r"^@triton\.jit|^@jit", text, re.MULTILINE)) for text in src),
        },
    }


ACTUAL = actual()
CASES = [(group, name) for group in BUDGET for name in BUDGET[group]]


def test_every_package_has_a_budget():
    packages = {path.name for path in (ROOT / "src" / "lolcats").iterdir() if (path / "__init__.py").is_file()}
    assert packages - {"recipes", "sweeps"} <= set(BUDGET["src"])


@pytest.mark.parametrize(("group", "name"), CASES)
def test_within_the_budget(group, name):
    limit, found = BUDGET[group][name], ACTUAL[group][name]
    assert found <= limit, (
        f"{group}.{name} is {found}, budget.toml allows {limit}: take something out; a rise is a commit of its own"
    )
    assert found >= (1 - SLACK) * limit - 20, f"{group}.{name} is {found}: lower it in budget.toml from {limit}"
