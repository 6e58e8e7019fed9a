"""Pictures, traces and pages of a plan's `Timeline`; each file is one format."""
