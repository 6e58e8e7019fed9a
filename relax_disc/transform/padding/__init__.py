"""Padded batches without their padding."""
