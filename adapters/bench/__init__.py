"""Measurements behind `oval bench`."""
