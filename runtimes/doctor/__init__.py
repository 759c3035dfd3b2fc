"""``fatdeploy doctor``: packages, driver and GPUs of this machine, and what it can do."""
