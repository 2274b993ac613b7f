"""C++ kernels for a CPU, compiled on this machine at first use."""
