"""Many sources: workers share a queue and an engine, and batches are as large as pays on this machine."""
