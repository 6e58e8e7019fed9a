"""Which rows of padded batches can reach the results of a step."""
