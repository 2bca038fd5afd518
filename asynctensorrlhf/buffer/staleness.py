"""Arithmetic of staleness, in policy versions, and of how far rollouts may run ahead.

Knows integers only; does not know threads, groups or tensors.
"""

from __future__ import annotations


def staleness(policy_version: int, min_policy_version: int) -> int:
    """How many publications lie between the oldest weights of a sample and the trainer's.

    Args:
        policy_version: the trainer's version when the sample is consumed.
        min_policy_version: the oldest version that produced any of its tokens.

    Raises:
        ValueError: the sample comes from a version that isn't published yet.
    """
    if min_policy_version > policy_version:
        raise ValueError(f"min_policy_version must be at most {policy_version}, the newest, got {min_policy_version}")
    return policy_version - min_policy_version


def is_stale(policy_version: int, min_policy_version: int, max_staleness: int) -> bool:
    """Whether a sample is too old to be trained; one at exactly `max_staleness` is not."""
    return policy_version - min_policy_version > max_staleness


def paced_outstanding(max_staleness: int, groups_per_step: int) -> int:
    """Most groups admitted but neither trained nor dropped, so that none is stale when its turn comes.

    In admission order, the group with n outstanding ones before it is trained n // groups_per_step versions after its
    admission. The last of `(1 + max_staleness) * groups_per_step` is therefore trained exactly at the limit.

    While every version consumes `groups_per_step` groups this is the same as
    `admitted - dropped < (policy_version + 1 + max_staleness) * groups_per_step`. Counted from the outstanding groups
    it also holds where that form does not: after a batch that was discarded instead of trained (there both the version
    and the dropped groups would raise the limit), and after a resume with another `groups_per_step`.
    """
    return (1 + max_staleness) * groups_per_step


def free_outstanding(max_staleness: int, groups_per_step: int) -> int:
    """Default capacity of rollouts that run free: one batch more than the pace allows, so that they never wait for it.

    What the extra batch makes stale is evicted and counted; more would only be generated to be thrown away.
    """
    return (2 + max_staleness) * groups_per_step
