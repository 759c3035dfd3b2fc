"""Plans of TensorRT, built on the device that runs them."""
