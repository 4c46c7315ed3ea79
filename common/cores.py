"""How the services share a machine's cores, where the settings leave it open."""

from __future__ import annotations

from common.settings import Settings

CORES_FOR_TWO_GROUPS = 4
"""With fewer, a draft that works beside the target takes the cores that the target would use."""


def group_count(settings: Settings, cores: int) -> int:
    if settings.groups != "auto":
        return settings.groups
    can_overlap = cores >= CORES_FOR_TWO_GROUPS and settings.drafter != "none" and settings.max_num_seqs > 1
    return 2 if can_overlap else 1


def target_threads(settings: Settings, cores: int) -> int:
    return settings.target_threads or cores


def draft_threads(settings: Settings, cores: int) -> int:
    """With one group target and draft work by turns, so each has all cores in its turn."""
    together = group_count(settings, cores) > 1
    return settings.draft_threads or max(1, cores // 2 if together else cores)
