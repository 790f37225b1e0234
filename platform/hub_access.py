"""The Hugging Face hub on machines without a network.

huggingface_hub tries each file of a model six times, which takes 23 seconds, before it reads its cache.
"""

from __future__ import annotations

import logging
import os
import ssl
from functools import cache
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

logger = logging.getLogger(__name__)
ANSWER_S = 10.0


def prepare_loading(name: str) -> None:
    """Makes this process and its children read only the local cache of the hub if the hub does not answer.

    Does nothing if `name` is a path on this machine. The caller calls it before it loads `name`, which may be an id of
    the hub, and before it imports `datasets`.
    """
    if not Path(name).expanduser().exists():
        _use_cache_without_hub()


@cache
def _use_cache_without_hub() -> None:
    from huggingface_hub import constants

    if constants.is_offline_mode() or (reason := _unreachable(constants.ENDPOINT)) is None:
        return
    logger.warning(
        "%s cannot be reached (%s): models and data with an id of the hub are read from its local cache",
        constants.ENDPOINT,
        reason,
    )
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


def _unreachable(address: str) -> str | None:
    """Returns why nothing answers at `address`; None if something does. Uses the proxy of HTTPS_PROXY, as the hub's
    library does."""
    try:
        urlopen(Request(address, method="HEAD"), timeout=ANSWER_S).close()
    except HTTPError:
        return None
    except OSError as error:
        reason = getattr(error, "reason", error)
        return None if isinstance(reason, ssl.SSLError) else str(reason)  # the library may trust other certificates
    return None
