"""What runs beside the compiled code: sessions, planners and library kernels, in C++."""
