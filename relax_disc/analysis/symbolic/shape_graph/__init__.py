"""What a module says of its sizes, as one system of equalities."""
