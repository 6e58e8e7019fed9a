"""What a kernel's body says: stages, aliasing, cost, scratch memory."""
