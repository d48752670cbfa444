"""From a command line and a TOML preset to one checked settings object; and back to TOML.

Precedence: defaults < preset < command line. Environment variables are no source.
"""

import argparse
import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from config.errors import UserError, reason_of
from config.fields import Settings

PRESETS = Path(__file__).parent
FALSE_WORDS = {"false", "0", "no", "off", "f", "n"}
BOOLEAN_WORDS = FALSE_WORDS | {"true", "1", "yes", "on", "t", "y"}
SettingsType = TypeVar("SettingsType", bound=Settings)


class _Parser(argparse.ArgumentParser):
    """argparse, but what it cannot read is a UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists every setting)")


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is list


def _one(field: FieldInfo) -> FieldInfo:
    """The field itself, or one value of a list."""
    return FieldInfo.from_annotation(get_args(field.annotation)[0]) if _is_list(field) else field


def _choices(field: FieldInfo) -> list[str]:
    if field.annotation is bool:
        return ["true", "false"]
    return [choice for choice in get_args(_one(field).annotation) if isinstance(choice, str) and choice]


def _allowed(field: FieldInfo) -> str:
    """What a setting accepts, in words: its choices, or its type and range."""
    if _is_list(field):
        return f"one or more, each {_allowed(_one(field))}"
    if _choices(field):
        return " or ".join(_choices(field))
    kinds = {int: "a whole number", float: "a number"}
    if field.annotation not in kinds:
        return "text"
    words = {"ge": "{} or more", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}
    bounds = {name: getattr(rule, name) for rule in field.metadata for name in words if hasattr(rule, name)}
    ranges = [words[name].format(bound) for name, bound in bounds.items()]
    return ", ".join([kinds[field.annotation], " and ".join(ranges)] if ranges else [kinds[field.annotation]])


def _parser(schema: type[Settings], takes_preset: bool) -> _Parser:
    words = [word for word, wanted in (("[PRESET]", takes_preset), ("[SOURCE]", schema.positional)) if wanted]
    parser = _Parser(
        usage=" ".join(["%(prog)s", *words, "[--setting=value ...]"]),
        description=schema.__doc__,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    if takes_preset:
        parser.add_argument("preset", nargs="?", help="a TOML file of settings, or the name of one in config/")
    metavars: dict[object, str] = {int: "N", float: "X", str: "TEXT"}
    for name, field in schema.model_fields.items():
        default = f"default: {field.default!r}" if field.default not in ("", []) else "default: none"
        help_text = f"{field.description} ({default})".replace("%", "%%")
        if name == schema.positional:
            parser.add_argument(name, nargs="?", metavar=name.upper(), help=help_text)
            continue
        metavar = "|".join(_choices(field)) or metavars[_one(field).annotation]
        if _is_list(field):
            parser.add_argument(f"--{name}", action="extend", nargs="+", metavar=metavar, help=help_text)
        elif field.annotation is bool:
            parser.add_argument(f"--{name}", nargs="?", const="true", metavar=metavar, help=help_text)
        else:
            parser.add_argument(f"--{name}", metavar=metavar, help=help_text)
    return parser


def _refuse_unknown(names: Iterable[str], schema: type[Settings], where: str) -> None:
    for name in names:
        if name not in schema.model_fields:
            nearest = difflib.get_close_matches(name.replace("-", "_"), schema.model_fields, n=1, cutoff=0.5)
            advice = f"did you mean {nearest[0]}?" if nearest else "--help lists every setting"
            raise UserError(f"{where}: there is no setting {name}: {advice}")


def _read_preset(name: str, schema: type[Settings]) -> dict[str, Any]:
    path = Path(name)
    if not path.exists() and path.name == name and path.suffix in ("", ".toml"):
        path = PRESETS / f"{path.stem}.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        known = ", ".join(sorted(preset.stem for preset in PRESETS.glob("*.toml")))
        raise UserError(f"preset {name}: no such file; expected a TOML file of settings, or one of: {known}") from None
    except OSError as error:
        raise UserError(f"preset {name}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"preset {name}: not a TOML file of 'name = value' lines: {reason_of(error)}") from None
    _refuse_unknown(values, schema, f"preset {name}")
    return values


@dataclass(frozen=True)
class Given:
    """What the user gave, not yet checked.

    Attributes:
        command_line: the values given there.
        values: those and the preset's.
        preset_name: the preset, if any.
    """

    command_line: dict[str, Any]
    values: dict[str, Any]
    preset_name: str | None


def read_given(schema: type[Settings], argv: list[str], *, takes_preset: bool = False) -> Given:
    """Read a command line and its preset.

    Raises:
        UserError: an unknown key (with the nearest valid one), or an unreadable preset.
    """
    for argument in argv:
        if not _is_text(argument):
            raise UserError(f"{argument!r}: not UTF-8; expected UTF-8 text (rename the file if it is one)")
    namespace, unknown = _parser(schema, takes_preset).parse_known_args(_with_values(argv, schema))
    options = [argument.lstrip("-").split("=", 1)[0] for argument in unknown if argument.startswith("-")]
    _refuse_unknown(options, schema, "command line")
    if unknown:
        raise UserError(f"{unknown[0]}: not expected here; settings are given as --name=value")
    command_line = vars(namespace)
    name = command_line.pop("preset", None) if takes_preset else None
    preset = {} if name is None else _read_preset(name, schema)
    return Given(command_line, overlaid(schema, preset, command_line), name)


def _is_text(value: str) -> bool:
    """Whether a string holds no half characters, as bytes that are not UTF-8 become on a command line."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _with_values(argv: list[str], schema: type[Settings]) -> list[str]:
    """Give a bare --flag its value, so that it does not swallow the word after it."""
    flags = {f"--{name}" for name, field in schema.model_fields.items() if field.annotation is bool}
    following = [*argv, ""][1:]
    return [
        f"{argument}=true" if argument in flags and after.lower() not in BOOLEAN_WORDS else argument
        for argument, after in zip(argv, following, strict=True)
    ]


def _is_chosen(schema: type[Settings], values: dict[str, Any], name: str) -> bool:
    """Whether a setting is given, and not as false or empty."""
    value = values.get(name)
    return bool(value) and not (schema.model_fields[name].annotation is bool and str(value).lower() in FALSE_WORDS)


def overlaid(schema: type[Settings], below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, where `above` goes before `below` and sets aside what it stands instead of."""
    for name, set_aside in schema.instead_of.items():
        if _is_chosen(schema, above, name):
            below = {key: value for key, value in below.items() if key not in set_aside}
    return {**below, **above}


def checked(schema: type[SettingsType], values: dict[str, Any]) -> SettingsType:
    """A settings object from raw values.

    Raises:
        UserError: naming the first wrong key, what was given and what is allowed.
    """
    _refuse_unknown(map(str, values), schema, "settings")
    for name, value in values.items():
        if isinstance(value, str) and ("\0" in value or not _is_text(value)):
            raise UserError(
                f"{name} = {value!r}: expected text without zero bytes ({schema.model_fields[name].description})"
            )
    for name, set_aside in schema.instead_of.items():
        clash = [other for other in set_aside if _is_chosen(schema, values, name) and _is_chosen(schema, values, other)]
        if clash:
            raise UserError(f"{name} and {clash[0]} are both given: use one of them")
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # from a rule about several settings, which names them itself
            raise UserError(first["msg"].removeprefix("Value error, ")) from None
        name = str(first["loc"][0])
        field = schema.model_fields[name]
        if first["type"] == "missing":
            raise UserError(f"{name}: is missing; expected {_allowed(field)} ({field.description})") from None
        raise UserError(f"{name} = {first['input']!r}: expected {_allowed(field)} ({field.description})") from None


def parse(schema: type[SettingsType], argv: list[str], *, takes_preset: bool = False) -> SettingsType:
    """The checked settings of a command line and its preset.

    Raises:
        UserError: as `read_given` and `checked`.
    """
    return checked(schema, read_given(schema, argv, takes_preset=takes_preset).values)


def plain_values(settings: Settings) -> dict[str, Any]:
    """Settings as plain values that `checked` takes back, without those that others stand instead of."""
    values = settings.model_dump()
    set_aside = {other for name, others in settings.instead_of.items() if values[name] for other in others}
    return {name: value for name, value in values.items() if name not in set_aside}


def to_toml(settings: Settings) -> str:
    """Settings as TOML that `read_given` takes back as a preset."""
    return tomli_w.dumps(plain_values(settings))
