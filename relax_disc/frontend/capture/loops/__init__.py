"""Python loops over a dynamic length, as one operator that runs a step any number of times."""
