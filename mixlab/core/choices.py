"""A choice in a config: a name from a registry, with options that are checked before anything is built."""

import contextlib
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from mixlab.core.errors import ConfigError, near_misses

Builder = TypeVar("Builder", bound=Callable[..., Any])


@dataclass(frozen=True)
class Choice:
    """`"pool"` or `{"name": "pool", "size": 5}` after checking; `options` is a frozen dataclass."""

    name: str
    options: Any

    def plain(self) -> dict[str, Any]:
        """Return an entry that parses back to this choice, with every option, so that later defaults do not matter."""
        return {"name": self.name, **plain(self.options)}


@dataclass(frozen=True)
class NoOptions:
    """Options of a choice that has none."""


class Registry(Generic[Builder]):
    """The named things of one kind (mixers, norms, ...), each with its options and its builder."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, tuple[type, Builder]] = {}
        self._renamed: dict[str, str] = {}

    def register(
        self, name: str, options: type = NoOptions, *, formerly: tuple[str, ...] = ()
    ) -> Callable[[Builder], Builder]:
        """Register the builder under a name; `formerly` are older names that files and programs may still use."""

        def add(builder: Builder) -> Builder:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = (options, builder)
            self._renamed |= dict.fromkeys(formerly, name)
            return builder

        return add

    def names(self) -> list[str]:
        return sorted(self._entries)

    def builder(self, choice: Choice) -> Builder:
        return self._entries[choice.name][1]

    def parse(self, entry: Any) -> Choice:
        """Check an entry: a name, a mapping with a name and options, or a Choice."""
        if isinstance(entry, Choice):
            return entry
        if isinstance(entry, str):
            entry = {"name": entry}
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise ConfigError(
                f"A {self.kind} is a name or a mapping with 'name' and options; got {entry!r}. "
                f"Names: {', '.join(self.names())}."
            )
        given_name = str(entry["name"])
        name = self._renamed.get(given_name, given_name)
        if name not in self._entries:
            raise ConfigError(f"Unknown {self.kind} {name!r}. {near_misses(name, self._entries)}")
        given = {key: value for key, value in entry.items() if key != "name"}
        return Choice(name, make(self._entries[name][0], given, f"{self.kind} {name!r}"))


def make(cls: type, given: Mapping[str, Any], what: str) -> Any:
    """Make an instance of a dataclass from plain values; unknown keys and wrong types are errors."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in given:
        if key not in fields:
            key = str(key)
            hint = near_misses(key, fields) if fields else "It has no options."
            raise ConfigError(f"Unknown option {key!r} of {what}. {hint}")
    values = {key: coerce(value, hints[key], f"option {key!r} of {what}") for key, value in given.items()}
    try:
        return cls(**values)
    except TypeError as error:
        missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in given]
        raise ConfigError(f"{what} needs {', '.join(missing)}.") from error


def coerce(value: Any, hint: Any, what: str) -> Any:
    """Return a value as the annotated type: ints become floats, lists become tuples, entries become choices."""
    origin = typing.get_origin(hint)
    if origin is Annotated and value is not None:
        return hint.__metadata__[0].parse(value)
    if hint is Any or (origin is Literal and value in typing.get_args(hint)):
        return value
    if origin in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if value is None and len(options) < len(typing.get_args(hint)):
            return None
        if len(options) == 1:  # its own message says more than "must be ..."
            return coerce(value, options[0], what)
        for option in options:
            with contextlib.suppress(ConfigError):
                return coerce(value, option, what)
    elif origin is tuple and isinstance(value, (list, tuple)):
        item = typing.get_args(hint)[0]
        return tuple(coerce(part, item, what) for part in value)
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    elif hint is type(None) and value is None:
        return None
    elif dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return make(typing.cast(type, hint), value, what)
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"The {what} must be {describe(hint)}; got {value!r}.")


def describe(hint: Any) -> str:
    """Put a type annotation into words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"a {hint.__metadata__[0].kind}"
    if origin is Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(arg) for arg in args)
    if origin is tuple:
        return f"a list of {describe(args[0])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "nothing"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def plain(value: Any) -> Any:
    """Return a config value as JSON-ready data."""
    if isinstance(value, Choice):
        return value.plain()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    return value
