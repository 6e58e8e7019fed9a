"""Peaks of live memory under orders by different rules."""
