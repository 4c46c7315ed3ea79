"""A file that a service touches while its work makes progress; container health checks read its age.

`python -m common.alive NAME` exits 0 if the service NAME of this run directory was alive within STALE_S.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from common.settings import SettingsError, load_settings

STALE_S = 15.0


def alive_path(run_dir: str, service: str) -> Path:
    return Path(run_dir) / f"{service}.alive"


def touch_alive(run_dir: str, service: str) -> None:
    alive_path(run_dir, service).touch()


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m common.alive SERVICE", file=sys.stderr)
        return 2
    try:
        settings = load_settings("python -m common.alive", [], os.environ)
        age_s = time.time() - alive_path(settings.run_dir, sys.argv[1]).stat().st_mtime
    except (SettingsError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if age_s < STALE_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
