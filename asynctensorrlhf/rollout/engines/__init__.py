"""Engines that turn requests into samples."""
