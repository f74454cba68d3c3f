"""``python -m foreprop``, which is how torchrun starts a command of foreprop's."""

from foreprop.cli.main import main

if __name__ == "__main__":
    main()
