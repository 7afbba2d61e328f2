"""Options as text, `key=value`, `WORD[key=value,…]` or `NAME(key=value,…)`: split, read and written back."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from forkmerge.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_BARE_WORD = re.compile(r"[A-Za-z_][\w.:/-]*")
_ASSIGNMENT = re.compile(r"([^=()\[\]{}\"']*)=(.*)", re.DOTALL)
_BARE_KEY = re.compile(r"[\w-]+", re.ASCII)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def split_words(text: str) -> list[str]:
    """Return the parts of a comma-separated list, stripped; commas inside brackets and quotes do not count.

    Example:
        >>> split_words("stl, forkmerge[interval=5,prune_to=2] ,torchjd:GradVac(beta=0.1)")
        ['stl', 'forkmerge[interval=5,prune_to=2]', 'torchjd:GradVac(beta=0.1)']
    """
    parts, open_brackets, quote = [""], [""], ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _CLOSING:
            open_brackets.append(_CLOSING[char])
        elif char == open_brackets[-1]:
            open_brackets.pop()
        elif char == "," and len(open_brackets) == 1:
            parts.append("")
            continue
        parts[-1] += char
    if quote or len(open_brackets) > 1:
        raise ConfigError(f"{text!r} has no closing {quote or open_brackets[-1]}.")
    return [part.strip() for part in parts if part.strip()]


def split_options(word: str, opening: str = "[") -> tuple[str, dict[str, Any]]:
    """Return a word without its options, and the options; in round brackets, text has quotes, as in Python.

    Example:
        >>> split_options("ew[lr=0.003, task_weights={a=1}]")
        ('ew', {'lr': 0.003, 'task_weights': {'a': 1}})
    """
    base, arguments = split_call(word, opening)
    if not all(key for key, _ in arguments) or len(dict(arguments)) < len(arguments):
        raise ConfigError(f"{word!r}: write WORD[key=value,…], e.g. forkmerge[interval=500,prune_to=3].")
    return base, {key: option_from(f"{base}[{key}=…]", text, words=opening == "[") for key, text in arguments}


def split_call(text: str, opening: str) -> tuple[str, list[tuple[str, str]]]:
    """Return a name and, if it has any, its arguments in brackets as (key, text); the key is "" where there is none.

    Example:
        >>> split_call("STCH(Mean(), mu=0.5)", "(")
        ('STCH', [('', 'Mean()'), ('mu', '0.5')])
    """
    name, bracket, rest = text.strip().partition(opening)
    if bracket and not rest.endswith(_CLOSING[opening]):
        raise ConfigError(f"{text!r} has no closing {_CLOSING[opening]}.")
    return name.strip(), [split_assignment(part) for part in split_words(rest[:-1])]


def split_assignment(text: str) -> tuple[str, str]:
    """Return the key and the text of `key=value`, stripped; the key is "" where there is none."""
    match = _ASSIGNMENT.fullmatch(text)
    return (match[1].strip(), match[2].strip()) if match else ("", text.strip())


def option_from(where: str, text: str, *, words: bool = True) -> Any:
    """Return a value written as in TOML, or else as in Python; `none` is None.

    With `words`, a word needs no quotes, which a shell would take away.
    """
    if text.lower() == "none":
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    if parsed.keys() == {"value"}:
        return parsed["value"]
    for read in (ast.literal_eval, float):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            pass
    if words and _BARE_WORD.fullmatch(text):
        return text
    raise ConfigError(f"{where}: {text!r} is not a TOML value such as 200, 0.5, true, [1, 2] or a word.")


def show_options(options: Mapping[str, Any]) -> str:
    """Return options in the one form that the same options always have; nothing for no options.

    Example:
        >>> show_options({"prune_to": 3, "interval": 500})
        '[interval=500,prune_to=3]'
    """
    shown = ",".join(f"{key}={_show(options[key])}" for key in sorted(options))
    return f"[{shown}]" if options else ""


def _show(value: Any, *, inside: bool = False) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        bare = not inside and _BARE_WORD.fullmatch(value) and option_from("", value) == value
        return value if bare else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_show_key(key)}={_show(item, inside=True)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_show(item, inside=True) for item in value) + "]"
    return repr(value)


def _show_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)
