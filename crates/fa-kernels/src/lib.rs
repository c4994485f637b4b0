//! The GPU kernels: from a kernel spec to a launch.
