"""Kernels tuned with TVM's MetaSchedule: search, replay on symbolic sizes, judgement, database.

`tasks` finds the kernels of a step, `search` tunes one at fixed sizes in worker processes, `replay`
turns what was found into a schedule for all sizes, `judgement` compares it with the rule, `tune`
does all of this, and `database` keeps what won.  Compiling reads the database alone.
"""
