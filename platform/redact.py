"""Removes secrets from what is printed, stored or sent to loggers.

Secrets are passwords and query values of URLs, tokens of known forms, values of variables and keys with a telling name,
and the values of such environment variables of this process. Not covered: texts of prompts and responses, and secrets
that have neither a telling name nor a known form.
"""

from __future__ import annotations

import os
import re
from typing import Any

MARK = "***"
_WORDS = r"api_?key|access_?key|private_?key|secret_?key|token|password|passwd|pwd|secret|credentials?|authorization"
_NAME = re.compile(rf"(?i)(^|[_.-])({_WORDS})$")  # not max_tokens, tokenizer, api_key_env
# bounded, so that a text of any kind takes time in proportion to its length
_USER = re.compile(r"(://)[^\s'\"/?#]{0,500}@")
_USER_WITH_SLASH = re.compile(r"(://)[^\s'\"/@:]{1,200}:[^\s'\"]{0,500}(?=@)")  # a password that holds a slash
_QUERY = re.compile(rf"(?i)([?&;][^=&\s]{{0,60}}(?:{_WORDS}|key|sig|signature|auth|session|code)=)[^&\s'\"#]+")
_ANY_QUERY = re.compile(r"(\w://[^\s'\"?]{0,500}\?)[^\s'\"]+")
_FORMS = re.compile(r"\b(sk-|hf_|gh[pousr]_|xox[abprs]-|glpat-|AKIA)[A-Za-z0-9_-]{8,}")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_VARIABLE = re.compile(rf"(?i)((?:{_WORDS})['\"]?\s{{0,9}}[=:]\s{{0,9}}['\"]?)(?!\*\*\*)[^\s'\",;}}\]]+")
_SHORTEST = 6  # characters of an environment variable that is taken for a secret
_WORKING_FOLDER = "PWD"  # set by every shell
_variables: set[str] = set()  # that a config names


def is_secret(name: str) -> bool:
    """Returns whether a variable, key or header of this name holds a secret."""
    return bool(_NAME.search(name))


def hide_variable(name: str) -> None:
    """Takes the value of this environment variable for a secret from now on, whatever its name is."""
    _variables.add(name)


def redacted(text: str) -> str:
    """Returns a message without secrets. Queries of URLs are removed as a whole."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and (name in _variables or (is_secret(name) and name != _WORKING_FOLDER)):
            text = text.replace(value, MARK)
    text = _plain(text)
    for pattern in (_ANY_QUERY, _USER_WITH_SLASH, _VARIABLE):
        text = pattern.sub(rf"\g<1>{MARK}", text)
    return text


def without_secrets(tree: Any, name: str = "") -> Any:
    """Returns a copy of nested values of a config without secrets; what is no secret stays as it is."""
    if isinstance(tree, dict):
        return {key: without_secrets(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return [without_secrets(value, name) for value in tree]
    if not isinstance(tree, str) or not tree:
        return tree
    if is_secret(name):
        return MARK
    return _plain(tree)


def _plain(text: str) -> str:
    text = _USER.sub(rf"\g<1>{MARK}@", text)
    text = _QUERY.sub(rf"\g<1>{MARK}", text)
    text = _BEARER.sub(rf"\g<1> {MARK}", text)
    return _FORMS.sub(MARK, text)
