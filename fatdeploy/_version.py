"""The version, in a file without imports so that the build can read it."""

VERSION = "0.2.0"
