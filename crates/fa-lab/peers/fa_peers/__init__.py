"""Other attention kernels, timed for `fa bench --peers`: see peers.py beside this folder."""
