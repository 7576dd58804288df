"""Puts the binary that HELIOSCTL_BINARY names into the wheel, with the tag HELIOSCTL_TAG.

tools/wheels.sh builds the binary and tells both.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            binary, tag = os.environ["HELIOSCTL_BINARY"], os.environ["HELIOSCTL_TAG"]
        except KeyError as e:
            raise SystemExit(
                f"{e.args[0]} is not set; build this wheel with tools/wheels.sh"
            ) from None
        if not os.access(binary, os.X_OK):
            raise SystemExit(f"HELIOSCTL_BINARY: {binary} is no program")
        build_data["pure_python"] = False
        build_data["tag"] = tag
        build_data["shared_scripts"][str(Path(binary).resolve())] = "heliosctl"
