"""Order, rematerialization and the arena: what the run time plans with."""
