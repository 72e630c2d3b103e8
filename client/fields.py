"""Sets fields of protobuf messages; an error names the argument, its value and what is allowed.

protobuf's own messages say "bad argument type for built-in operation", and not of what.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

_M = TypeVar("_M", bound=Message)
_MAX_QUOTED: Final = 100  # characters of a value quoted in an error
_INTEGER_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def message(kind: type[_M], **values: Any) -> _M:
    """A message with the given fields; a field that is None stays unset."""
    built = kind()
    for name, value in values.items():
        if value is None:
            continue
        if hasattr(field := getattr(built, name), "extend"):
            assign(name, field.extend, value)
        else:
            assign_field(built, name, value)
    return built


def assign_field(message: Message, name: str, value: Any) -> None:
    """Sets a scalar field. TypeError or ValueError if it cannot hold the value."""
    field = message.DESCRIPTOR.fields_by_name[name]
    assign(name, lambda given: setattr(message, name, given), value, field.cpp_type)


def assign(name: str, setter: Any, value: Any, cpp_type: int | None = None) -> None:
    """Calls `setter(value)`; its TypeError or ValueError names the argument and its range."""
    try:
        setter(value)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is {quoted(value)}: character {error.start} is half a surrogate pair; "
            "allowed: text that UTF-8 can encode"
        ) from None
    except ValueError as error:
        limits = _INTEGER_RANGES.get(cpp_type) if cpp_type is not None else None
        if limits is not None:
            allowed = f"allowed: an integer from {limits[0]} to {limits[1]}"
            raise ValueError(f"{name} is {quoted(value)}; {allowed}") from None
        raise ValueError(f"{name} is {quoted(value)}: {error}") from None
    except TypeError as error:
        raise TypeError(f"{name} is {quoted(value)}: {error}") from None


def as_dict(message: Message) -> dict[str, Any]:
    """All fields of a message by their protobuf names, unset ones with their defaults."""
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def quoted(value: object) -> str:
    """The value as an error shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"
