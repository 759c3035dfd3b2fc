"""``python -m fatdeploy`` is the command line."""

from fatdeploy.cli import main

if __name__ == "__main__":
    main()
