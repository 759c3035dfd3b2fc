"""``fatdeploy bench``: turns in processes of their own, timed, in a table and on a page."""
