"""``python -m foreprop``: torchrun starts foreprop's commands so."""

from foreprop.tools.cli.main import main

if __name__ == "__main__":
    main()
