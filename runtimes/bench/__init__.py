"""``fatdeploy bench``: measures bundles in processes of their own; writes a table, JSON and a page."""
