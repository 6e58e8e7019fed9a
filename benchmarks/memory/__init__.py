"""What a memory budget costs and what it saves."""
