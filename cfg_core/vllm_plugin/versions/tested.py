"""Which vLLM versions were tested, and what happens with another one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

import vllm

from cfg_core.errors import CompatibilityError
from cfg_core.foreign import check
from cfg_core.patches import Patch
from cfg_core.vllm_plugin import versions

TESTED = ("0.32", "0.33")
"""The vLLM versions that the tests ran with, oldest first. docs/versions.md says which tests."""

ALLOW = "CFG_SERVE_ALLOW_UNTESTED_VLLM"
"""Environment variable: 1 is the same as the option `allow_untested_vllm`. UNCHECKED also leaves
out the check of names, for tests that shall find out what works in spite of a missing one."""

UNCHECKED = "unchecked"

_SHOWN = 8

logger = logging.getLogger(__name__)


def is_tested() -> bool:
    return ".".join(vllm.__version__.split(".")[:2]) in TESTED


def check_version(allow_untested: bool = False) -> None:
    """Refuse a vLLM version that was not tested, unless it is allowed.

    Raises CompatibilityError.
    """
    if not (is_tested() or allow_untested or os.environ.get(ALLOW) in ("1", UNCHECKED)):
        raise CompatibilityError(
            f"cfg-serve was tested with vLLM {' and '.join(TESTED)}, and this is"
            f" {vllm.__version__}: install vllm=={TESTED[-1]}.0. Or set allow_untested_vllm to true"
            " at your own risk: then only names and signatures of vLLM are checked."
        )


def check_names(package: str, patches: Iterable[Patch]) -> None:
    """If this vLLM was not tested, check that it has what our modules in `package` use.

    These are its modules, classes, attributes and functions, the parameters of what we override or
    patch, and the arguments of what we call. Whether they still mean the same cannot be checked. It
    takes some seconds. Raises CompatibilityError that names what is missing.
    """
    if is_tested() or os.environ.get(ALLOW) == UNCHECKED:
        return
    found = [
        problem
        for module, path in check.modules(package)
        if not versions.is_for_another(path)
        for problem in check.problems(path, module)
    ]
    found += [check.told(use) for use in check.patch_uses(patches) if use.problem]
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CompatibilityError(
            f"vLLM {vllm.__version__} lacks what cfg-serve uses: {'; '.join(found[:_SHOWN])}{more}."
            f" Install vllm=={TESTED[-1]}.0."
        )
    logger.warning(
        "vLLM %s was not tested with cfg-serve. Its names and signatures fit (%s), but guidance may"
        " still be wrong. Tested: %s.",
        vllm.__version__,
        package,
        ", ".join(TESTED),
    )
