"""Passes over Relax modules, one a file; each usable alone in `tvm.transform.Sequential`."""
