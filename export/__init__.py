"""From a PyTorch model to a bundle. Needs ``pip install 'fatdeploy[export]'``; nothing here runs on a device."""
