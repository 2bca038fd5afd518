"""Counting publications."""

import threading

import pytest

from asynctensorrlhf.orchestrator.version_manager import VersionManager


def test_versions_count_publications_from_the_start():
    versions = VersionManager(start=4)
    assert versions.current == 4
    assert versions.bump() == 5
    assert versions.current == 5
    assert versions.staleness(3) == 2
    assert versions.staleness(5) == 0


def test_a_future_version_is_an_error():
    with pytest.raises(ValueError, match="must be at most 0, the newest, got 1"):
        VersionManager().staleness(1)


def test_a_negative_start_is_an_error():
    with pytest.raises(ValueError, match="start must be >= 0, got -1"):
        VersionManager(start=-1)


def test_bumps_from_many_threads_give_every_version_once():
    versions, seen = VersionManager(), []

    def bump_often():
        seen.extend([versions.bump() for _ in range(500)])

    threads = [threading.Thread(target=bump_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(seen) == list(range(1, 2001))
