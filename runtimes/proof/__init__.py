"""Is a bundle what it says: probes, engines side by side, fidelity, the gate of quantized bundles."""
