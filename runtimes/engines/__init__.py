"""What computes: the protocol of engines, how one is opened, and what all of them share."""
