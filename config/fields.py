"""What settings are made of: the types of their values, and what all of them have in common."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def whole_number(value: Any) -> Any:
    """Accept 1e3 and 1000.0 where a whole number is meant; leave the rest to pydantic.

    Raises:
        ValueError: it is a number, but no whole one, or no number.
    """
    if isinstance(value, bool):
        raise ValueError("expected a whole number")
    if isinstance(value, str | float):
        try:
            number = float(value)
        except ValueError:
            raise ValueError("expected a whole number") from None
        if not number.is_integer():
            raise ValueError("expected a whole number")
        # int() keeps every digit of what float() would round.
        return int(value) if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() else int(number)
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Whole = Annotated[int, BeforeValidator(whole_number), Field(le=2**31)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Seed = Annotated[int, BeforeValidator(whole_number), Field(ge=0, lt=2**63)]


class Settings(BaseModel):
    """What all settings have in common: unknown keys are refused, values are checked, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    # A setting that stands instead of others: never both in one place, and on the command line it sets aside what a
    # preset says about them.
    instead_of: ClassVar[dict[str, tuple[str, ...]]] = {}
    # The setting that may be given without its name, in first place.
    positional: ClassVar[str | None] = None
