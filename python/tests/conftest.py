"""What all test files share."""

import os

# By default jax takes three quarters of a GPU's memory at its first array, and torch's tests run beside.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# A second device, on which jax makes arrays where a test says so.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
