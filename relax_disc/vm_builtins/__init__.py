"""What runs beside the compiled code: sessions, planners, library kernels; C++ and its twins."""
