"""The one model of a program that all planning reads: the tensor graph and how it is extracted."""
