"""Proofs that one size is at most another, over the declared ranges."""
