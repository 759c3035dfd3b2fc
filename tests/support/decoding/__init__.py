"""What tests of decoding share."""
