"""Chat messages: every part is understood or refused by its path; no URL is ever fetched.

Rule for content given as parts: the texts are joined with a line break between them.
"""

from __future__ import annotations

from typing import Any

from kvferry.core.errors import InvalidRequest
from kvferry.router.intake import check_unicode

PART_SEPARATOR = "\n"
MAX_MESSAGES = 4096

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role of the API -> role that chat templates know."""
_TOOL_ROLES = ("tool", "function")
_REFUSED_FIELDS = ("tool_calls", "function_call", "tool_call_id", "audio", "refusal")
"""They carry part of the conversation, which must not be lost in silence."""
_KNOWN = ("role", "content", "name", *_REFUSED_FIELDS)
_TEXT_PARTS = ("text", "input_text")


def parse_messages(raw: Any) -> tuple[list[dict[str, str]], list[str]]:
    """Return (messages with plain string content, paths of fields that were ignored).

    Raises InvalidRequest with the path of the first wrong field.
    """
    if raw is None:
        raise InvalidRequest("messages", "is required")
    if not isinstance(raw, list):
        raise InvalidRequest("messages", "must be a list of messages")
    if not 1 <= len(raw) <= MAX_MESSAGES:
        raise InvalidRequest("messages", f"must hold 1 to {MAX_MESSAGES} messages")
    ignored = [
        f"messages[{i}].{key}"
        for i, message in enumerate(raw)
        if isinstance(message, dict)
        for key in message
        if key not in _KNOWN
    ]
    return [_message(message, f"messages[{i}]") for i, message in enumerate(raw)], ignored


def _message(raw: Any, path: str) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise InvalidRequest(path, "must be an object with role and content")
    role = raw.get("role")
    if role in _TOOL_ROLES:
        raise InvalidRequest(f"{path}.role", f"{role!r} is not supported yet")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    for field in _REFUSED_FIELDS:
        if raw.get(field):
            raise InvalidRequest(f"{path}.{field}", "is not supported yet")
    content = _content(raw.get("content"), f"{path}.content")
    if not content and role == "user":
        raise InvalidRequest(f"{path}.content", "must not be empty")
    message = {"role": _ROLES[role], "content": content}
    name = raw.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise InvalidRequest(f"{path}.name", "must be a string")
        check_unicode(name, f"{path}.name")
        message["name"] = name
    return message


def _content(raw: Any, path: str) -> str:
    if raw is None:
        raise InvalidRequest(path, "is required")
    if isinstance(raw, str):
        check_unicode(raw, path)
        return raw
    if not isinstance(raw, list):
        raise InvalidRequest(path, "must be a string or a list of text parts")
    if not raw:
        raise InvalidRequest(path, "must not be an empty list")
    return PART_SEPARATOR.join(_part(part, f"{path}[{i}]") for i, part in enumerate(raw))


def _part(raw: Any, path: str) -> str:
    if not isinstance(raw, dict):
        raise InvalidRequest(path, 'must be an object such as {"type": "text", "text": "..."}')
    kind = raw.get("type")
    if kind not in _TEXT_PARTS:
        shown = repr(kind)[:60]
        raise InvalidRequest(
            f"{path}.type", f"{shown} is not supported: this model reads text parts only"
        )
    text = raw.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.text", "must be a string")
    check_unicode(text, f"{path}.text")
    for key in raw:
        if key not in ("type", "text", "annotations", "cache_control"):
            raise InvalidRequest(f"{path}.{key}", "is not known in a text part")
    return text
