"""Buffers between rollout and training: tickets, order, flow control, eviction, and library spellings of them.

Knows its public names only.
"""

from asynctensorrlhf.buffer.collate import collate
from asynctensorrlhf.buffer.experience_buffer import BoundedReplayBuffer, ReplayBufferActor, VersionedReplayBuffer
from asynctensorrlhf.buffer.group_buffer import GroupAwareReplayBuffer, GroupBufferEntry
from asynctensorrlhf.buffer.replay_buffer import BufferStalled, ReplayBuffer

__all__ = [
    "BoundedReplayBuffer",
    "BufferStalled",
    "GroupAwareReplayBuffer",
    "GroupBufferEntry",
    "ReplayBuffer",
    "ReplayBufferActor",
    "VersionedReplayBuffer",
    "collate",
]
