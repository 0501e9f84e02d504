"""Tests; the folders mirror those of the repository."""
