from dataclasses import dataclass
from typing import Any, Literal

import pytest

from mixlab.core.choices import Registry, coerce
from mixlab.core.errors import ConfigError

THINGS: Registry[Any] = Registry("thing")


@dataclass(frozen=True)
class BoxOptions:
    width: int = 3
    share: float = 0.5
    side: Literal["left", "right"] = "left"
    sizes: tuple[int, ...] = ()


THINGS.register("box", BoxOptions)(object)
THINGS.register("ball", formerly=("boule",))(object)


def test_a_name_and_a_mapping_without_options_are_the_same_choice() -> None:
    assert THINGS.parse("box") == THINGS.parse({"name": "box"})


def test_an_older_name_is_the_same_choice() -> None:
    assert THINGS.parse("boule") == THINGS.parse({"name": "boule"}) == THINGS.parse("ball")
    assert THINGS.names() == ["ball", "box"]


def test_plain_names_every_option_and_parses_back() -> None:
    choice = THINGS.parse({"name": "box", "width": 5, "sizes": [1, 2]})
    assert choice.plain() == {"name": "box", "width": 5, "share": 0.5, "side": "left", "sizes": [1, 2]}
    assert THINGS.parse(choice.plain()) == choice


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("bx", r"Unknown thing 'bx'. Did you mean 'box'\?"),
        ("zzz", "Known: ball, box"),
        ({"name": "box", "widht": 1}, r"Unknown option 'widht' of thing 'box'. Did you mean 'width'\?"),
        ({"name": "ball", "width": 1}, "has no options"),
        ({"name": "box", "width": "3"}, "must be a whole number; got '3'"),
        ({"name": "box", "width": True}, "must be a whole number; got True"),
        ({"name": "box", "side": "up"}, "must be one of 'left', 'right'; got 'up'"),
        ({"name": "box", "sizes": [1, "a"]}, "must be a whole number; got 'a'"),
        ({"width": 3}, "a name or a mapping"),
        (7, "a name or a mapping"),
    ],
)
def test_errors_say_what_was_given_and_what_is_known(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        THINGS.parse(entry)


def test_a_whole_number_is_a_number() -> None:
    assert coerce(1, float, "x") == 1.0
    assert coerce(None, float | None, "x") is None


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        THINGS.register("box")(object)
