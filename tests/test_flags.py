"""Settings become flags: every field one, its comment the line of help."""

import argparse
from dataclasses import dataclass

import pytest

from nestling.flags import add_settings, settings_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of no verb."""

    budget: int | None = None  # tokens at most
    share: float = 0.5  # of 100 %


def parse(*argv: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_settings(parser, Settings)
    return settings_of(parser.parse_args(argv), Settings)


def test_a_field_that_may_be_none_is_a_flag_of_what_it_is_when_it_is_set() -> None:
    assert parse().budget is None
    assert parse("--budget", "4e3").budget == 4000
    with pytest.raises(SystemExit):
        parse("--budget", "many")


def test_a_recipe_sets_a_field_that_may_be_none(tmp_path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("budget = 12")
    assert parse("--recipe", str(recipe)) == Settings(budget=12)
    recipe.write_text("budget = 'many'")
    with pytest.raises(ValueError, match="is a str, expected int"):
        parse("--recipe", str(recipe))


def test_the_help_of_a_field_is_the_comment_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    out = capsys.readouterr().out
    assert "tokens at most" in out
    assert "of 100 % (default: 0.5)" in out
