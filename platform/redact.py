"""Removes secrets from what is printed, stored or sent to loggers.

Secrets are:

* passwords and query values of URLs;
* tokens and keys of known forms;
* values of variables, headers and keys with a telling name;
* values of environment variables of this process with such a name, and passwords in the addresses of the others.

Not covered: texts of prompts and responses, and secrets that have neither a telling name nor a known form.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import Any

MARK = "***"
_WORDS = (
    r"(?:api|access|private|secret|account)[_-]?key|token|password|passwd|passphrase|pwd|secret|credentials?"
    r"|authorization|cookie"
)
_NAME = re.compile(  # not max_tokens, tokenizer, api_key_env, sort_key
    rf"(?i)(?:^|[_.-]|(?-i:(?<=[a-z])(?=[A-Z])))(?:{_WORDS}|pat|pass)$|(?:password|passphrase)$|(?-i:[A-Z\d]_KEY$)"
)
# bounded, so that a text of any kind takes time in proportion to its length
_USER = re.compile(r"(:\\?/\\?/)[^\s'\"/?#]{0,500}@")
_USER_WITHOUT_SCHEME = re.compile(r"(\b[\w.%+-]{1,100}:)[^\s'\"/?#@:{}]{3,200}@(?=[\w-]{1,100}[.:])")
_USER_WITH_SLASH = re.compile(r"(://)[^\s'\"/@:]{1,200}:[^\s'\"]{0,500}(?=@)")  # a password that holds a slash
_QUERY = re.compile(rf"(?i)([?&;][^=&;?\s]{{0,60}}(?:{_WORDS}|key|sig|signature|auth|session|code)=)[^&\s'\"#]+")
_ANY_QUERY = re.compile(r"(\w://[^\s'\"?]{0,500}\?)[^\s'\"]+")
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z\d]{8,}|(?:sk-|sk_live_|gh[pousr]_|github_pat_|xox[abprs]-|glpat-|nvapi-|AKIA|AIza)[\w-]{8,}"
    r"|ASIA[A-Z0-9]{12,}|(?:npm_|r8_)[A-Za-z0-9]{30,}|pypi-AgE[A-Za-z0-9_-]{8,}|eyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?)"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]{0,20000}"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_HEADER = re.compile(r"(?i)((?:authorization|cookie)['\"]?\s{0,9}:\s{0,9}['\"]?)(?!\*\*\*)[^\s'\"][^'\"\n]*")
_VARIABLE = re.compile(rf"(?i)((?:{_WORDS})\\?['\"]?\s{{0,9}}[=:]\s{{0,9}}\\?['\"]?)(?!\\?['\"]?\*\*\*)[^\s'\",;}}\]]+")
_ARGUMENT = re.compile(
    rf"(?i)((?<!-)--[\w-]{{0,40}}(?:{_WORDS})\s{{1,9}}|\blogin\s+\S{{1,200}}\s+password\s+)[^\s-]\S*"
)
_ADDRESS = re.compile(r"(?:\w+://)?[^\s/@:]*:([^\s@]+)@")  # an address with a password, as in HTTPS_PROXY
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
        secret = value if name in _variables else _secret_in(name, value)
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, MARK)
    text = _plain(text)
    for pattern in (_ANY_QUERY, _USER_WITH_SLASH, _HEADER, _VARIABLE, _ARGUMENT):
        text = pattern.sub(rf"\g<1>{MARK}", text)
    return text


@lru_cache(1024)
def _secret_in(name: str, value: str) -> str:
    """Returns the secret that an environment variable holds, "" for none."""
    if is_secret(name) and name != _WORKING_FOLDER:
        return value
    address = _ADDRESS.match(value) if "@" in value else None
    return address[1] if address else ""


def without_secrets(tree: object, name: str = "") -> Any:
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
    for pattern in (_USER, _USER_WITHOUT_SCHEME):
        text = pattern.sub(rf"\g<1>{MARK}@", text)
    text = _QUERY.sub(rf"\g<1>{MARK}", text)
    text = _BEARER.sub(rf"\g<1> {MARK}", text)
    return _FORMS.sub(MARK, text)
