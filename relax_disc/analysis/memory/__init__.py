"""Peaks, reports, offsets and rematerialization, over tensor graphs."""
