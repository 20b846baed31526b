"""Passwords and the like among settings, which no file, console or fingerprint may hold."""

from __future__ import annotations

from typing import Any

SECRETS = ("token", "api_key", "password", "secret")
SECRET_ENDINGS = ("_api_key", "_password", "_secret", "hf_token", "access_token", "auth_token")
MASK = "***"


def masked(node: Any, name: str = "") -> Any:
    """The node with passwords and the like replaced; `${...}` stays, it only says where one comes from."""
    if isinstance(node, dict):
        return {key: masked(value, str(key).lower()) for key, value in node.items()}
    if isinstance(node, list):  # may be command-line arguments: --api-key=VALUE, or --api-key and then VALUE
        flags = ["", *map(_flag, node)]
        return [masked(value, flags[place] or name) for place, value in enumerate(node)]
    if not isinstance(node, str) or node.startswith("${"):
        return node
    flag, given, _ = node.partition("=")
    if given and _is_secret(_flag(flag)):
        return f"{flag}={MASK}"
    return MASK if _is_secret(name) else node


def _flag(argument: Any) -> str:
    text = str(argument)
    return text[2:].replace("-", "_").lower() if text.startswith("--") else ""


def _is_secret(name: str) -> bool:
    return name in SECRETS or name.endswith(SECRET_ENDINGS)
