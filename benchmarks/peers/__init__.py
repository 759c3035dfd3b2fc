"""The engines that bundles are compared with, and all engines behind one call."""
